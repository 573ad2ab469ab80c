"""Save a converted model to one file, and load it without executing code from the file.

Weights are stored as raw bytes. Graphs are stored as JSON and validated before torch reads them.

    contents.json            format, versions, options; per program, the tensor of each name
    programs/0/graph.json    a graph in torch's schema, without metadata that names Python objects
    programs/0/plan.json     its plan
    tensors                  the bytes of all tensors, in order, each once

Example inputs are not saved: they may be private, and zeros of the same sizes replace them.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from mezzo._errors import CheckpointError, UnsupportedError
from mezzo._files import atomic_writer
from mezzo._torch import OpOverload, require, schema, serialize
from mezzo.conversion.archive import (
    PART,
    ArchiveReader,
    TensorReader,
    TensorWriter,
    reading,
    writing,
)
from mezzo.conversion.export import quiet_loggers
from mezzo.conversion.signature import available_device, available_devices, zero_inputs
from mezzo.conversion.validate_graph import strip_metadata, validate_program

StrPath = str | os.PathLike[str]

_FORMAT, _VERSION = "mezzo converted program", 1
_CONTENTS = "contents.json"


@dataclass(frozen=True)
class SavedProgram:
    """One program of a saved model."""

    exported: ExportedProgram
    """The converted graph and its weights."""
    plan: dict[str, Any]
    """Its plan, as JSON values."""


@dataclass(frozen=True)
class SavedModel:
    """The content of a file."""

    programs: tuple[SavedProgram, ...]
    """One for each example size; they share weights."""
    options: dict[str, Any]
    """The options of the conversion, as JSON values."""


def save(path: StrPath, model: SavedModel) -> None:
    """Write a model to one file, atomically.

    Weights that several names or programs share are written once. Example inputs are not written.
    """
    require("file format of converted programs")
    tensors = TensorWriter()
    programs = [_serialize(program, tensors) for program in model.programs]
    with atomic_writer(path) as file, writing(file) as archive:
        for index, (program, (graph, _)) in enumerate(zip(model.programs, programs, strict=True)):
            archive.json(_graph_part(index), graph)
            archive.json(_plan_part(index), program.plan)
        contents = {
            "format": _FORMAT,
            "version": _VERSION,
            "torch": torch.__version__,
            "byteorder": sys.byteorder,
            "options": model.options,
            "programs": [names for _, names in programs],
            "tensors": tensors.write(archive),
        }
        archive.json(_CONTENTS, contents)


def load(
    path: StrPath, *, device: str | torch.device | None = None, custom_ops: Collection[str] = ()
) -> SavedModel:
    """Read and validate a file that `save` wrote; nothing from the file is executed.

    `device` replaces the device from which the model was saved. Custom ops are accepted only if
    `custom_ops` names their namespace, because the file chooses their arguments.
    """
    require("file format of converted programs")
    target = None if device is None else available_device(device)
    # Opened outside of `reading_errors`, so that a missing file raises FileNotFoundError.
    with Path(path).open("rb") as file, reading_errors(path), reading(file) as archive:
        contents = _contents(archive)
        _require_device(contents, target)
        return _read_model(archive, contents, target, custom_ops)


@contextmanager
def reading_errors(path: StrPath) -> Iterator[None]:
    """Convert any error about a file's content to a `CheckpointError` that names the file."""
    name = os.fspath(path)
    try:
        yield
    except (UnsupportedError, MemoryError):
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"{name!r} cannot be loaded: {str(error).rstrip('.')}. Nothing of it was run."
        ) from error.__cause__
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is not a converted model, or is damaged: {_last_line(error)}. Pass a file"
            " that Converted.save wrote."
        ) from error


def _serialize(program: SavedProgram, tensors: TensorWriter) -> tuple[Any, dict[str, Any]]:
    """Return a program as JSON values, and the names of its tensors.

    The graph is validated here too, so that every file that is written can be read.
    """
    exported = program.exported
    names = {
        "state": tensors.add(exported.state_dict),
        "constants": tensors.add(exported.constants),
    }
    try:
        with quiet_loggers(serialize.__name__):
            serialized = serialize.serialize(_without_data(exported))
        graph = strip_metadata(json.loads(serialized.exported_program))
        validate_program(graph, _namespaces(exported))
    except CheckpointError as error:
        raise UnsupportedError(f"The program cannot be saved: {error}.") from error
    except Exception as error:
        raise UnsupportedError(
            f"The program cannot be saved: torch cannot serialize it. {_last_line(error)}"
        ) from error
    return graph, names


def _without_data(exported: ExportedProgram) -> ExportedProgram:
    """Return the program with meta tensors: some versions of torch pickle all that it holds.

    The data itself is written by `TensorWriter`.
    """
    bare = copy.copy(exported)
    bare._state_dict = {name: _to_meta(value) for name, value in exported.state_dict.items()}
    bare._constants = {name: _to_meta(value) for name, value in exported.constants.items()}
    bare._example_inputs = None
    return bare


def _to_meta(tensor: Any) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    # torch checks that a parameter is an nn.Parameter.
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _contents(archive: ArchiveReader) -> dict[str, Any]:
    if _CONTENTS not in archive.names:
        raise CheckpointError("it was not written by Converted.save")
    contents = archive.json(_CONTENTS)
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        raise CheckpointError("it was not written by Converted.save")
    if contents["version"] > _VERSION:
        raise CheckpointError(
            f"it has version {contents['version']}, and this mezzo reads up to {_VERSION}; load it"
            " with a newer mezzo"
        )
    if contents["byteorder"] != sys.byteorder:
        raise CheckpointError(
            f"it was saved on a {contents['byteorder']}-endian machine, and this one is"
            f" {sys.byteorder}-endian"
        )
    if not isinstance(contents["options"], dict):
        raise CheckpointError("its options are not a mapping")
    indices = range(len(contents["programs"]))
    expected = {_CONTENTS, *map(_graph_part, indices), *map(_plan_part, indices), PART}
    if wrong := archive.names ^ expected:
        raise CheckpointError(f"the part {min(wrong)!r} is unexpected or missing")
    return contents


def _read_model(
    archive: ArchiveReader,
    contents: dict[str, Any],
    device: torch.device | None,
    custom_ops: Collection[str],
) -> SavedModel:
    graphs = [
        _read_graph(archive.json(_graph_part(index)), contents["torch"], device, custom_ops)
        for index in range(len(contents["programs"]))
    ]
    tensors = TensorReader(archive, contents["tensors"], device)
    programs = []
    for index, (graph, names) in enumerate(zip(graphs, contents["programs"], strict=True)):
        state, constants = tensors.named(names["state"]), tensors.named(names["constants"])
        exported = _deserialize(graph, state, constants)
        programs.append(SavedProgram(exported, archive.json(_plan_part(index))))
    return SavedModel(tuple(programs), contents["options"])


def _read_graph(
    plain: Any, written_by: str, device: torch.device | None, custom_ops: Collection[str]
) -> schema.ExportedProgram:
    if plain["schema_version"]["major"] != schema.SCHEMA_VERSION[0]:
        raise CheckpointError(
            f"its graph was written by torch {written_by}, which this torch {torch.__version__}"
            " does not read; convert the model again"
        )
    return validate_program(_with_device(plain, device), custom_ops)


def _deserialize(
    graph: schema.ExportedProgram,
    state: dict[str, torch.Tensor],
    constants: dict[str, torch.Tensor],
) -> ExportedProgram:
    """Rebuild a validated graph around tensors that are read already; torch unpickles nothing."""
    with quiet_loggers(serialize.__name__), warnings.catch_warnings():
        # torch only warns if it cannot generate code for a graph. `save` never writes such a graph.
        warnings.filterwarnings("error", "Unable to execute the generated python source code")
        exported = serialize.ExportedProgramDeserializer().deserialize(graph, state, constants)
    _check_fit(exported, {**constants, **state})
    exported._example_inputs = zero_inputs(exported)
    return exported


def _check_fit(exported: ExportedProgram, tensors: dict[str, torch.Tensor]) -> None:
    nodes = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    for spec in exported.graph_signature.input_specs:
        if spec.target is not None:
            expected, found = nodes[spec.arg.name], tensors[spec.target]
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                raise CheckpointError(
                    f"its tensor {spec.target!r} is {found.dtype} {tuple(found.shape)}, and the"
                    f" graph has {expected.dtype} {tuple(expected.shape)}"
                )


def _require_device(contents: dict[str, Any], device: torch.device | None) -> None:
    for saved_from in (
        {record["device"] for record in contents["tensors"]} if device is None else ()
    ):
        if torch.device(saved_from).type not in available_devices():
            raise UnsupportedError(
                f"The program was saved from {saved_from!r}, and there is no such device here. Load"
                " it with device='cpu'."
            )


def _with_device(graph: Any, device: torch.device | None) -> Any:
    """Return the graph with every device replaced."""
    if device is None:
        return graph
    if isinstance(graph, list):
        return [_with_device(item, device) for item in graph]
    if not isinstance(graph, dict):
        return graph
    replacement = {"type": device.type, "index": device.index}
    return {
        name: replacement if name in {"device", "as_device"} else _with_device(value, device)
        for name, value in graph.items()
    }


def _namespaces(exported: ExportedProgram) -> set[str]:
    """Return the namespaces of the custom ops that a program calls, subgraphs included."""
    modules = [
        module
        for module in exported.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
    ]
    return {
        node.target.namespace
        for module in modules
        for node in module.graph.nodes
        if isinstance(node.target, OpOverload)
    } - {"aten"}


def _last_line(error: BaseException) -> str:
    """Return the last line of an error, where torch's long messages name the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")


def _graph_part(index: int) -> str:
    return f"programs/{index}/graph.json"


def _plan_part(index: int) -> str:
    return f"programs/{index}/plan.json"
