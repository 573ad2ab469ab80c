"""A converted program as ONNX, with the dtypes that the plan gave it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram

from mezzo._errors import UnsupportedError
from mezzo._files import atomic_writer
from mezzo._torch import pytree
from mezzo.conversion.export import quiet_loggers
from mezzo.conversion.signature import named_leaves

Place = str | os.PathLike[str]

_BFLOAT16_OPSET = 22
"""The first in which convolutions, pooling and recurrent layers take bfloat16."""
_LARGEST = 2**31 - 2**24
"""Bytes of weights that one protobuf message holds, with room for the graph."""
_NAMES = {
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
"""What ONNX calls the dtypes of weights."""
_LOGGERS = ("torch.onnx._internal.exporter", "onnxscript", "onnx_ir")


def export_each(
    programs: Sequence[ExportedProgram], path: Place, *, opset: int | None = None
) -> tuple[Path, ...]:
    """Write one program under the name given, or several with their number before the ending (`model.0.onnx`, `model.1.onnx`): ONNX files hold one graph."""
    target = Path(path)
    several = tuple(
        target.with_name(f"{target.stem}.{place}{target.suffix}") for place in range(len(programs))
    )
    paths = several if len(programs) > 1 else (target,)
    for exported, one in zip(programs, paths, strict=True):
        export(exported, one, opset=opset)
    return paths


def export(exported: ExportedProgram, path: Place, *, opset: int | None = None) -> None:
    """Write a program as an ONNX file, checked, whole or not at all. Weights of more than 2 GB go into a file beside it, with `.data` behind its name.

    `opset` is the version of the ONNX operators: torch's choice if left out, and for bfloat16 at
    least 22.
    """
    onnx = _package()
    if opset is None and torch.bfloat16 in _dtypes(exported):
        opset = _BFLOAT16_OPSET
    names = output_names(exported)
    program = _translated(exported, opset)
    _tidy(program.model)
    _name_outputs(program.model, names)
    _warn_of_state(program)
    _check_weights(program.model, exported)
    if sum(tensor.nbytes for tensor in exported.state_dict.values()) > _LARGEST:
        _write_large(onnx, program, Path(path))
        return
    proto = program.model_proto
    _check(onnx, proto)
    with atomic_writer(path) as file:
        file.write(proto.SerializeToString())


def output_names(exported: ExportedProgram) -> list[str]:
    """Names for the outputs by where they stand in what the model returns: `logits`, `hidden_0`; one alone is `output`.

    None has no name, for ONNX has no None. A number that does not depend on the inputs is refused.
    """
    values = pytree.tree_unflatten(
        exported.graph_signature.user_outputs, exported.call_spec.out_spec
    )
    names = []
    for name, value in named_leaves(values):
        if isinstance(value, str):
            names.append(name)
        elif value is not None:
            raise UnsupportedError(
                f"The model returns {value!r} as {name!r}, and an ONNX graph returns tensors. Leave"
                " it out before you convert."
            )
    return names


def _package() -> Any:
    try:
        import onnx  # noqa: PLC0415
        import onnxscript  # noqa: F401, PLC0415
    except ImportError as error:
        raise UnsupportedError(
            f"Writing ONNX needs a package that is not installed: {error.name}. Install it with:"
            " pip install 'mezzo[onnx]'"
        ) from error
    return onnx


def _translated(exported: ExportedProgram, opset: int | None) -> Any:
    from mezzo.conversion.onnx_translations import TRANSLATIONS  # noqa: PLC0415

    try:
        # It warns and logs about packages that are not here and ways it uses itself.
        with quiet_loggers(*_LOGGERS), warnings.catch_warnings(action="ignore"), torch.no_grad():
            return torch.onnx.export(
                exported,
                (),
                None,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=opset,
                external_data=False,
                custom_translation_table=TRANSLATIONS,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise UnsupportedError(
            f"The program cannot be written as ONNX: {_deepest(error)}. Save it with"
            " Converted.save, or replace the op."
        ) from error


def _tidy(model: Any) -> None:
    """Compute what depends on constants alone, and turn sequences into splits: they take no bfloat16.

    Not with all of onnxscript's optimizer: it folds a float32 batch norm into a float16
    convolution, whose weights are float32 then, and writes a second copy of a tied weight that is
    read transposed. What reads a weight stays as it is; runtimes fold it when they load the file.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass  # noqa: PLC0415
    from onnxscript.optimizer import fold_constants  # noqa: PLC0415

    weights = set(model.graph.initializers.values())
    fold_constants(
        model,
        should_fold=lambda node: False if any(value in weights for value in node.inputs) else None,
    )
    RemoveUnusedNodesPass()(model)


def _name_outputs(model: Any, names: list[str]) -> None:
    """Name the outputs. ONNX names values of every kind alike: one whose name is taken gets `_out` behind it."""
    from onnx_ir.passes.common import OutputFixPass  # noqa: PLC0415

    # The pass puts a copy behind an output that is an input, a weight or another output, and
    # renames the input.
    graph = model.graph
    inputs = [one.name for one in graph.inputs]
    OutputFixPass()(model)
    taken = {
        *inputs,
        *graph.initializers,
        *(value.name for node in graph.all_nodes() for value in node.outputs),
    }
    for value, name in zip(graph.outputs, names, strict=True):
        while name in taken:
            name += "_out"  # noqa: PLW2901
        taken.add(name)
        value.name = name
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name


def _check(onnx: Any, model: Any) -> None:
    """Have ONNX infer every type of a graph, or of a file."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedError(
            f"torch wrote an ONNX graph that ONNX itself refuses: {_line(str(error))}. Try another"
            " opset=."
        ) from error


def _check_weights(model: Any, exported: ExportedProgram) -> None:
    """See that each weight that is still there under its name has kept its dtype."""
    for name, tensor in exported.state_dict.items():
        written = model.graph.initializers.get(name)
        if (
            written is not None
            and tensor.dtype in _NAMES
            and written.dtype.name != _NAMES[tensor.dtype]
        ):
            raise UnsupportedError(
                f"torch wrote the weight {name!r} as {written.dtype}, and the program has"
                f" {tensor.dtype}. Save it with Converted.save."
            )


def _warn_of_state(program: Any) -> None:
    """ONNX graphs keep nothing from call to call, and torch leaves out what a graph writes without a word."""
    changed = sorted(set(program.exported_program.graph_signature.buffers_to_mutate.values()))
    if changed:
        warnings.warn(
            f"The program changes {', '.join(changed)} when it runs, and an ONNX file keeps no"
            " state: there they stay as they are now.",
            stacklevel=4,
        )


def _write_large(onnx: Any, program: Any, path: Path) -> None:
    """Weights beside the graph. Both are whole before either has its name, and the graph comes last."""
    target = path.resolve()
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        program.save(Path(folder) / target.name, external_data=True)
        _check(onnx, str(Path(folder) / target.name))
        for part in sorted(Path(folder).iterdir(), key=lambda one: one.name == target.name):
            part.replace(target.parent / part.name)


def _dtypes(exported: ExportedProgram) -> set[torch.dtype]:
    modules = [
        one for one in exported.graph_module.modules() if isinstance(one, torch.fx.GraphModule)
    ]
    found = [
        value
        for one in modules
        for node in one.graph.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
    ]
    return {value.dtype for value in found if isinstance(value, torch.Tensor)}


def _deepest(error: BaseException) -> str:
    """What lies at the bottom: on top torch tells how to report it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _line(str(error))


def _line(text: str) -> str:
    return next(
        (line.strip() for line in text.splitlines() if line.strip()), "no reason given"
    ).rstrip(".")
