"""`Converted`: a converted model that can be called, saved and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from mezzo._errors import ConversionError, UnsupportedError
from mezzo.conversion.plan import Casts, GraphPlan
from mezzo.conversion.signature import InputSignature, available_device, input_signature

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class ConvertedProgram:
    """One converted graph, with its plan."""

    exported: ExportedProgram
    """The graph and its weights."""
    plan: GraphPlan
    """The dtype of each node, and why."""


@dataclass(frozen=True)
class ConvertedPrograms:
    """The programs of a converted model, and how they were made."""

    programs: tuple[ConvertedProgram, ...]
    """One per example, in their order; they share weights."""
    options: Mapping[str, Any]
    """The options of the conversion, as JSON values."""
    references: tuple[ExportedProgram, ...] = ()
    """The float32 programs, for `Converted.compare`; empty if the model was loaded from a file."""


class Converted:
    """A model converted for inference. Call it like the model; gradients are off.

    Inputs may have other float dtypes than the example inputs and are cast. If the model was
    converted with several examples, the program that matches the sizes of the inputs runs.

    >>> import mezzo
    >>> converted = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="bfloat16")
    >>> converted(torch.ones(1, 4)).dtype, converted.casts.after.count
    (torch.float32, 2)
    """

    def __init__(self, converted: ConvertedPrograms) -> None:
        # Imported late: the runner imports the op registry, which `import mezzo` does not build.
        from mezzo.conversion.program_runner import ProgramRunner

        self._converted = converted
        self._signatures: tuple[InputSignature, ...] = tuple(
            input_signature(program.exported) for program in converted.programs
        )
        self._runners = tuple(ProgramRunner(program.exported) for program in converted.programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program that was converted for inputs of these sizes.

        Raises:
            ConversionError: No program was converted for inputs of these sizes.
        """
        index, args, kwargs = self._select_program(args, kwargs)
        try:
            with torch.no_grad():
                return self._runners[index](args, kwargs)
        except AssertionError as error:
            # These are torch's guards on the inputs. Asserts of the model itself pass through.
            if not str(error).startswith(("Guard failed", "Expected input")):
                raise
            raise ConversionError(
                f"The inputs are not what the program was converted for: {error}. Convert with"
                " examples or dynamic_shapes= that allow them."
            ) from error

    def _select_program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """Return the index of the program that fits the inputs, and the inputs in its dtypes."""
        for index, signature in enumerate(self._signatures):
            inputs = signature.cast_inputs(args, kwargs)
            if inputs is not None:
                return index, *inputs
        raise ConversionError(
            "No program was converted for these inputs:"
            f" {InputSignature.describe(args, kwargs)}. There are programs for:"
            f" {'; '.join(map(str, self._signatures))}. Convert with dynamic_shapes=, or with a"
            " list of example inputs, one for each size."
        )

    @property
    def plan(self) -> GraphPlan:
        """The dtype of each node of the first program, and why. `print` it to see a table."""
        return self.plans[0]

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """The plan of each program, in the order of the examples."""
        return tuple(program.plan for program in self._converted.programs)

    @property
    def casts(self) -> Casts:
        """The casts of the first program, and those that torch.autocast would make."""
        return self.plan.casts

    @property
    def module(self) -> nn.Module:
        """The first program as an `nn.Module`, for instance for torch.compile."""
        module: nn.Module = self._runners[0].module
        return module

    def save(self, path: StrPath) -> None:
        """Write all programs, their weights and plans to one file.

        The file replaces an existing one only once it is complete. Example inputs are not written.

        Args:
            path: The file to write.

        Raises:
            UnsupportedError: The program holds something that cannot be saved, such as a sparse
                tensor or an op that does not check its arguments.
        """
        from mezzo.conversion import saved_model

        programs = tuple(
            saved_model.SavedProgram(program.exported, program.plan.to_dict())
            for program in self._converted.programs
        )
        saved_model.save(path, saved_model.SavedModel(programs, dict(self._converted.options)))

    @classmethod
    def load(
        cls,
        path: StrPath,
        *,
        device: str | torch.device | None = None,
        custom_ops: Collection[str] = (),
    ) -> Converted:
        """Read a file that `save` wrote. Loading never executes code from the file.

        Args:
            path: The file to read.
            device: Where to put the weights; by default the device from which they were saved.
            custom_ops: Namespaces of custom ops that the program may call. Name only ops that are
                safe with any arguments: the file chooses them.

        Raises:
            CheckpointError: The file is damaged, was not written by `save`, or calls an op that is
                not allowed.
            UnsupportedError: The file needs a device that this machine does not have.
        """
        from mezzo.conversion import saved_model

        saved = saved_model.load(path, device=device, custom_ops=custom_ops)
        with saved_model.reading_errors(path):
            programs = tuple(
                ConvertedProgram(program.exported, GraphPlan.from_dict(program.plan))
                for program in saved.programs
            )
            return cls(ConvertedPrograms(programs, saved.options))

    def export_onnx(self, path: StrPath) -> tuple[Path, ...]:
        """Write the model as ONNX with the same dtypes, and return the paths of the files.

        Needs `pip install 'mezzo[onnx]'`. On a CPU, onnxruntime computes float16 but not
        bfloat16: this warns about a program in bfloat16, with how to export float16.

        Args:
            path: The file to write. Several programs become one file each, numbered before the
                suffix: `model.0.onnx`, `model.1.onnx`.

        Raises:
            UnsupportedError: An op has no ONNX counterpart, or ONNX rejects the graph.
        """
        from mezzo.conversion import onnx_export

        return onnx_export.export_each(
            [program.exported for program in self._converted.programs], path
        )

    def compare(self, *args: Any, against: nn.Module | None = None, **kwargs: Any) -> Any:
        """Compare the outputs with float32, and find the nodes that lose the most precision.

        Args:
            *args: Inputs of the model.
            against: The model to compare with, by its outputs only. By default this is the float32
                program of the conversion, and nodes are compared too. A model loaded from a file
                has none and needs `against`.
            **kwargs: Keyword arguments of the model.

        Returns:
            A `Comparison`. `print` it to see a table.
        """
        from mezzo.conversion.compare_nodes import compare

        index, args, kwargs = self._select_program(args, kwargs)
        references = self._converted.references
        reference = against if against is not None else references[index] if references else None
        if reference is None:
            raise ConversionError(
                "A model loaded from a file has no float32 program to compare with. Pass the model:"
                " converted.compare(x, against=model)."
            )
        return compare(reference, self._converted.programs[index].exported, args, kwargs)

    def to(self, device: str | torch.device) -> Converted:
        """Return a copy of the model on another device.

        The precisions stay as they were planned for the device of the conversion. To have them
        planned for the other device, convert the model there.

        Args:
            device: A device of this machine.
        """
        device, memo = available_device(device), dict[int, torch.Tensor]()
        programs = tuple(
            ConvertedProgram(_program_on(program.exported, device, memo), program.plan)
            for program in self._converted.programs
        )
        references = tuple(
            _program_on(reference, device, memo) for reference in self._converted.references
        )
        return Converted(ConvertedPrograms(programs, self._converted.options, references))

    def __copy__(self) -> Converted:
        return Converted(self._converted)

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        tensors: dict[int, torch.Tensor] = {}
        programs = tuple(
            ConvertedProgram(_copy_program(program.exported, torch.clone, tensors), program.plan)
            for program in self._converted.programs
        )
        references = tuple(
            _copy_program(reference, torch.clone, tensors)
            for reference in self._converted.references
        )
        return Converted(ConvertedPrograms(programs, self._converted.options, references))

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "A converted model cannot be pickled. Write it with converted.save(path), and read it"
            " with mezzo.Converted.load(path), which runs no code from the file."
        )

    def __repr__(self) -> str:
        count = len(self._converted.programs)
        return f"Converted({count} program{'s' * (count > 1)}, {self.casts})"


def _program_on(
    exported: ExportedProgram, device: str | torch.device, memo: dict[int, torch.Tensor]
) -> ExportedProgram:
    from torch.export.passes import move_to_device_pass

    copied = _copy_program(exported, lambda tensor: tensor.to(device), memo)
    moved = move_to_device_pass(copied, device)
    for part in moved.graph_module.modules():
        if isinstance(part, GraphModule):
            # torch changes the devices in the graph, and does not regenerate the code.
            part.recompile()
    moved._guards_code = exported._guards_code
    return moved


def _copy_program(
    exported: ExportedProgram,
    copy_tensor: Callable[[torch.Tensor], torch.Tensor],
    memo: dict[int, torch.Tensor],
) -> ExportedProgram:
    """Copy a program and its tensors; `memo` holds copies, so that programs go on sharing them."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in memo:
            tensor = copy_tensor(value.detach())
            memo[id(value)] = (
                nn.Parameter(tensor, requires_grad=value.requires_grad)
                if isinstance(value, nn.Parameter)
                else tensor
            )
        return memo[id(value)]

    # Imported late: it reads torch's op lists, which `import mezzo` does not build.
    from mezzo.conversion.nodes import copied_graph

    module = copied_graph(exported.graph_module)
    program = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=exported.graph_signature,
        state_dict={name: copied(value) for name, value in exported.state_dict.items()},
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants={name: copied(value) for name, value in exported.constants.items()},
        verifiers=exported.verifiers,
    )
    # A loaded program has its guards from the file; they cannot be derived from its graph.
    program._guards_code = exported._guards_code
    return program
