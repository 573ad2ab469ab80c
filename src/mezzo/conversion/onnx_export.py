"""Write a converted program as ONNX, with the planned dtypes."""

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
from mezzo._torch import ONNX_LOGGER, pytree
from mezzo.conversion.export import quiet_loggers
from mezzo.conversion.signature import named_leaves

StrPath = str | os.PathLike[str]

_BFLOAT16_OPSET = 22
"""The first opset in which convolutions, pooling and recurrent layers take bfloat16."""
_LARGEST = 2**31 - 2**24
"""Bytes of weights that fit into one protobuf message, with room for the graph."""
_NAMES = {
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
"""ONNX names of the dtypes of weights."""
_LOGGERS = (ONNX_LOGGER, "onnxscript", "onnx_ir")


def export_each(
    programs: Sequence[ExportedProgram], path: StrPath, *, opset: int | None = None
) -> tuple[Path, ...]:
    """Write one file per program, since ONNX files hold one graph; return their paths.

    Several programs are numbered before the suffix: `model.0.onnx`, `model.1.onnx`.
    """
    target = Path(path)
    several = tuple(
        target.with_name(f"{target.stem}.{index}{target.suffix}") for index in range(len(programs))
    )
    paths = several if len(programs) > 1 else (target,)
    if any(torch.bfloat16 in _dtypes(exported) for exported in programs):
        _warn_about_bfloat16()
    for exported, target_path in zip(programs, paths, strict=True):
        export(exported, target_path, opset=opset)
    return paths


def export(exported: ExportedProgram, path: StrPath, *, opset: int | None = None) -> None:
    """Check a program with ONNX, and write it atomically.

    Weights of more than 2 GB go into a second file with the suffix `.data`. `opset` is the version
    of the ONNX operators: by default torch's choice, or 22 for bfloat16.
    """
    onnx = _package()
    if opset is None and torch.bfloat16 in _dtypes(exported):
        opset = _BFLOAT16_OPSET
    names = output_names(exported)
    program = _translated(exported, opset)
    _fold_constants(program.model)
    _name_outputs(program.model, names)
    _warn_about_state(program)
    _check_weights(program.model, exported)
    if sum(tensor.nbytes for tensor in exported.state_dict.values()) > _LARGEST:
        _write_large(onnx, program, Path(path))
        return
    proto = program.model_proto
    _check(onnx, proto)
    with atomic_writer(path) as file:
        file.write(proto.SerializeToString())


def output_names(exported: ExportedProgram) -> list[str]:
    """Return names for the outputs by their paths: `logits`, `hidden_0`; a single one is `output`.

    None gets no name because ONNX has no None. A constant number raises `UnsupportedError`.
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
                f"The model returns {value!r} as {name!r}, and an ONNX graph returns tensors only."
                " Leave it out before you convert."
            )
    return names


def _package() -> Any:
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise UnsupportedError(
            f"Writing ONNX needs a package that is not installed: {error.name}. Install it with:"
            " pip install 'mezzo[onnx]'"
        ) from error
    return onnx


def _translated(exported: ExportedProgram, opset: int | None) -> Any:
    from mezzo.conversion.onnx_translations import TRANSLATIONS

    try:
        # torch warns and logs about missing optional packages and its own deprecated calls.
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
            f"The program cannot be written as ONNX: {_root_cause(error)}. Save it with"
            " Converted.save, or replace the op."
        ) from error


def _fold_constants(model: Any) -> None:
    """Fold constants, and replace sequences by splits: sequences take no bfloat16.

    The rest of onnxscript's optimizer is not used: it folds a float32 batch norm into a float16
    convolution, whose weights are float32 then, and writes a second copy of a tied weight that is
    read transposed. Nodes that read a weight are not folded; runtimes do so when they load the
    file.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass
    from onnxscript.optimizer import fold_constants

    weights = set(model.graph.initializers.values())
    fold_constants(
        model,
        should_fold=lambda node: False if any(value in weights for value in node.inputs) else None,
    )
    RemoveUnusedNodesPass()(model)


def _name_outputs(model: Any, names: list[str]) -> None:
    """Name the outputs; add `_out` to a name that an input, weight or inner value has already."""
    from onnx_ir.passes.common import OutputFixPass

    # The pass adds a copy for an output that is an input, a weight or another output, and renames
    # the input.
    graph = model.graph
    inputs = [input_.name for input_ in graph.inputs]
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
    """Check a graph or file with ONNX, which infers the type of every value."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedError(
            f"torch wrote an ONNX graph that ONNX itself rejects: {_first_line(str(error))}. Try"
            " another opset=."
        ) from error


def _check_weights(model: Any, exported: ExportedProgram) -> None:
    """Check that each weight that still has its name has kept its dtype."""
    for name, tensor in exported.state_dict.items():
        written = model.graph.initializers.get(name)
        if (
            written is not None
            and tensor.dtype in _NAMES
            and written.dtype.name != _NAMES[tensor.dtype]
        ):
            raise UnsupportedError(
                f"torch wrote the weight {name!r} as {written.dtype}, and in the program it is"
                f" {tensor.dtype}. Save the model with Converted.save."
            )


def _warn_about_bfloat16() -> None:
    """Warn that onnxruntime will not load the file on a CPU, which no check of ONNX finds."""
    warnings.warn(
        "The program computes in bfloat16, for which onnxruntime has no kernels on a CPU: it does"
        " not load the file there. For a CPU convert to float16: mezzo.convert(model, args,"
        " dtype='float16').export_onnx(path).",
        stacklevel=4,
    )


def _warn_about_state(program: Any) -> None:
    """Warn that ONNX graphs have no state: torch drops the mutation of buffers silently."""
    mutated = sorted(set(program.exported_program.graph_signature.buffers_to_mutate.values()))
    if mutated:
        warnings.warn(
            f"The program mutates {', '.join(mutated)} when it runs, and an ONNX graph has no"
            " state: in the file they stay as they are now.",
            stacklevel=4,
        )


def _write_large(onnx: Any, program: Any, path: Path) -> None:
    """Write the weights to a second file.

    Both files are complete before either gets its final name, and the graph gets it last.
    """
    target = path.resolve()
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        program.save(Path(folder) / target.name, external_data=True)
        _check(onnx, str(Path(folder) / target.name))
        for file in sorted(Path(folder).iterdir(), key=lambda entry: entry.name == target.name):
            file.replace(target.parent / file.name)


def _dtypes(exported: ExportedProgram) -> set[torch.dtype]:
    modules = [
        module
        for module in exported.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
    ]
    values = [
        value
        for module in modules
        for node in module.graph.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
    ]
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def _root_cause(error: BaseException) -> str:
    """Return the message of the first error in the chain; torch's last is about bug reports."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_line(str(error))


def _first_line(text: str) -> str:
    return next(
        (line.strip() for line in text.splitlines() if line.strip()), "no reason given"
    ).rstrip(".")
