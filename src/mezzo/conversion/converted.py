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
from mezzo.conversion.nodes import copied_graph
from mezzo.conversion.plan import Casts, GraphPlan
from mezzo.conversion.signature import InputSignature, available_device, input_signature


@dataclass(frozen=True)
class ConvertedProgram:
    """One converted graph, with its plan."""

    exported: ExportedProgram
    """The graph and its weights."""
    plan: GraphPlan
    """What was decided, and why."""


Place = str | os.PathLike[str]


@dataclass(frozen=True)
class ConvertedPrograms:
    """What a converted model is made of."""

    programs: tuple[ConvertedProgram, ...]
    """One for each example, in their order; they share weights."""
    options: Mapping[str, Any]
    """How it was converted, as plain data."""
    references: tuple[ExportedProgram, ...] = ()
    """The float32 programs, as long as the conversion that made them lives; a loaded file has
    none."""


class Converted:
    """A model converted for inference: call it like the model.

    >>> import mezzo
    >>> converted = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="bfloat16")
    >>> converted(torch.ones(1, 4)).dtype, converted.casts.after.count
    (torch.float32, 2)
    """

    def __init__(self, artefact: ConvertedPrograms) -> None:
        # Here, and not above: what runs a graph knows every op, and importing mezzo builds no table
        # of them.
        from mezzo.conversion.program_runner import ProgramRunner  # noqa: PLC0415

        self._converted = artefact
        self._fits: tuple[InputSignature, ...] = tuple(
            input_signature(program.exported) for program in artefact.programs
        )
        self._runners = tuple(ProgramRunner(program.exported) for program in artefact.programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program that was made for inputs of these sizes."""
        place, args, kwargs = self._chosen(args, kwargs)
        try:
            with torch.no_grad():
                return self._runners[place](args, kwargs)
        except AssertionError as error:
            # torch says so where an input breaks what it assumed while it traced; what the model
            # itself asserts is its own affair.
            if not str(error).startswith(("Guard failed", "Expected input")):
                raise
            raise ConversionError(
                f"The inputs are not what the program was converted for: {error}. Convert with"
                " examples or dynamic_shapes= that allow them."
            ) from error

    def _chosen(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        for place, one in enumerate(self._fits):
            taken = one.take(args, kwargs)
            if taken is not None:
                return place, *taken
        made = "; ".join(str(one) for one in self._fits)
        raise ConversionError(
            f"No program was converted for these inputs: {self._fits[0].describe(args, kwargs)}."
            f" There is: {made}. Convert with dynamic_shapes=, or with a list of example inputs,"
            " one for each size."
        )

    @property
    def plan(self) -> GraphPlan:
        """What was decided for each node, and why; of several programs, the first's. `plans` holds all."""
        return self.plans[0]

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """The plan of each program."""
        return tuple(program.plan for program in self._converted.programs)

    @property
    def casts(self) -> Casts:
        """How many casts there are and how many bytes they move, under torch.autocast and now."""
        return self.plan.casts

    @property
    def module(self) -> nn.Module:
        """The first program as a module, for torch.compile and the like."""
        module: nn.Module = self._runners[0].module
        return module

    def save(self, path: Place) -> None:
        """Write everything to one file, whole or not at all."""
        from mezzo.conversion import saved_model  # noqa: PLC0415

        programs = tuple(
            saved_model.SavedProgram(program.exported, program.plan.to_dict())
            for program in self._converted.programs
        )
        saved_model.save(path, saved_model.SavedModel(programs, dict(self._converted.options)))

    @classmethod
    def load(
        cls,
        path: Place,
        *,
        device: str | torch.device | None = None,
        custom_ops: Collection[str] = (),
    ) -> Converted:
        """Read a file that `save` wrote. Nothing in it is run: one that is damaged, or not ours, is refused."""
        from mezzo.conversion import saved_model  # noqa: PLC0415

        found = saved_model.load(path, device=device, custom_ops=custom_ops)
        with saved_model.reading_errors(path):
            programs = tuple(
                ConvertedProgram(one.exported, GraphPlan.from_dict(one.plan))
                for one in found.programs
            )
            return cls(ConvertedPrograms(programs, found.options))

    def export_onnx(self, path: Place) -> tuple[Path, ...]:
        """Write the program as ONNX, with the same dtypes; several programs become a file each, numbered. The files are given back."""
        from mezzo.conversion import onnx_export  # noqa: PLC0415

        return onnx_export.export_each(
            [program.exported for program in self._converted.programs], path
        )

    def compare(self, *args: Any, against: nn.Module | None = None, **kwargs: Any) -> Any:
        """How far the outputs are from float32, and which nodes lose most. A loaded program has no float32 one: give the model as `against`."""
        from mezzo.conversion import compare  # noqa: PLC0415

        place, args, kwargs = self._chosen(args, kwargs)
        references = self._converted.references
        reference = against if against is not None else references[place] if references else None
        if reference is None:
            raise ConversionError(
                "A loaded program has no float32 one to compare with. Pass the model:"
                " converted.compare(x, against=model)."
            )
        return compare.compare(reference, self._converted.programs[place].exported, args, kwargs)

    def to(self, device: str | torch.device) -> Converted:
        """The same programs on another device; this one stays where it is. The plan is still the one for the device of the conversion: best convert where you deploy."""
        device, memo = available_device(device), dict[int, torch.Tensor]()
        programs = tuple(
            ConvertedProgram(_moved(program.exported, device, memo), program.plan)
            for program in self._converted.programs
        )
        references = tuple(_moved(one, device, memo) for one in self._converted.references)
        return Converted(ConvertedPrograms(programs, self._converted.options, references))

    def __copy__(self) -> Converted:
        return Converted(self._converted)

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        tensors: dict[int, torch.Tensor] = {}
        programs = tuple(
            ConvertedProgram(_rebuilt(program.exported, torch.clone, tensors), program.plan)
            for program in self._converted.programs
        )
        references = tuple(
            _rebuilt(one, torch.clone, tensors) for one in self._converted.references
        )
        return Converted(ConvertedPrograms(programs, self._converted.options, references))

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "A converted model cannot be pickled. Write it with converted.save(path), and read it"
            " with mezzo.Converted.load(path), which runs no code from the file."
        )

    def __repr__(self) -> str:
        return (
            f"Converted({len(self._converted.programs)}"
            f" program{'s' * (len(self._converted.programs) > 1)}, {self.casts})"
        )


def _moved(
    exported: ExportedProgram, device: str | torch.device, memo: dict[int, torch.Tensor]
) -> ExportedProgram:
    from torch.export.passes import move_to_device_pass  # noqa: PLC0415

    moved = move_to_device_pass(_rebuilt(exported, lambda tensor: tensor.to(device), memo), device)
    for part in moved.graph_module.modules():
        if isinstance(part, GraphModule):
            # torch changes the devices that a graph names, and leaves its code as it was.
            part.recompile()
    moved._guards_code = exported._guards_code
    return moved


def _rebuilt(
    exported: ExportedProgram,
    change: Callable[[torch.Tensor], torch.Tensor],
    memo: dict[int, torch.Tensor],
) -> ExportedProgram:
    """A copy of a program around tensors that `change` makes of its own; `memo` holds those that are made already, so that programs go on sharing them."""

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in memo:
            made = change(value.detach())
            memo[id(value)] = (
                nn.Parameter(made, requires_grad=value.requires_grad)
                if isinstance(value, nn.Parameter)
                else made
            )
        return memo[id(value)]

    module = copied_graph(exported.graph_module)
    rebuilt = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=exported.graph_signature,
        state_dict={name: changed(value) for name, value in exported.state_dict.items()},
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants={name: changed(value) for name, value in exported.constants.items()},
        verifiers=exported.verifiers,
    )
    # A program that was loaded has its guards from the file: its graph alone does not tell them.
    rebuilt._guards_code = exported._guards_code
    return rebuilt
