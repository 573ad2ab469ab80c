"""Converted programs in one file, which never runs code: weights as raw bytes, graphs as plain values that are admitted before torch reads them.

    contents.json            format, versions, options, and for each program which tensor each of its names means
    programs/0/graph.json    a graph in torch's schema, without notes that could name Python objects
    programs/0/plan.json     its plan
    tensors                  the bytes of all tensors, in order, each once

Example inputs are not in it: they may be private, and zeros of their sizes serve as well.
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
from mezzo.conversion.signature import available_device, available_devices, zeros_like_inputs
from mezzo.conversion.validate_graph import strip_metadata, validate_program

Place = str | os.PathLike[str]

_FORMAT, _VERSION = "mezzo converted program", 1
_CONTENTS = "contents.json"


@dataclass(frozen=True)
class SavedProgram:
    """One program as it goes into a file and comes back."""

    exported: ExportedProgram
    """The converted graph and its weights."""
    plan: dict[str, Any]
    """Its plan as plain values."""


@dataclass(frozen=True)
class SavedModel:
    """What a file holds."""

    programs: tuple[SavedProgram, ...]
    """One for each example size; they share weights."""
    options: dict[str, Any]
    """How they were converted, as plain values."""


def save(path: Place, artefact: SavedModel) -> None:
    """Write programs to one file, whole or not at all. Weights that several names or programs share are written once; example inputs are not written."""
    require("file format of converted programs")
    tensors = TensorWriter()
    programs = [_described(stored, tensors) for stored in artefact.programs]
    with atomic_writer(path) as file, writing(file) as archive:
        for place, (stored, (graph, _)) in enumerate(zip(artefact.programs, programs, strict=True)):
            archive.json(_graph_part(place), graph)
            archive.json(_plan_part(place), stored.plan)
        contents = {
            "format": _FORMAT,
            "version": _VERSION,
            "torch": torch.__version__,
            "byteorder": sys.byteorder,
            "options": artefact.options,
            "programs": [names for _, names in programs],
            "tensors": tensors.write(archive),
        }
        archive.json(_CONTENTS, contents)


def load(
    path: Place, *, device: str | torch.device | None = None, custom_ops: Collection[str] = ()
) -> SavedModel:
    """Read programs that `save` wrote, or refuse the file without having run anything from it.

    `device` puts everything there instead of where it was saved from. Custom ops run only if
    `custom_ops` names their namespace: the file chooses their arguments.
    """
    require("file format of converted programs")
    target = None if device is None else available_device(device)
    # A file that is not there raises FileNotFoundError: it is opened before errors are turned into
    # others.
    with Path(path).open("rb") as file, reading_errors(path), reading(file) as archive:
        contents = _contents(archive)
        _require_device(contents, target)
        return _artefact(archive, contents, target, custom_ops)


@contextmanager
def reading_errors(path: Place) -> Iterator[None]:
    """Turn whatever goes wrong with a file's content into one `CheckpointError` that names the file."""
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
            f"{name!r} is no converted program, or is damaged: {_first_line(error)}. Pass a file"
            " that Converted.save wrote."
        ) from error


def _described(stored: SavedProgram, tensors: TensorWriter) -> tuple[Any, dict[str, Any]]:
    """A program as plain values, and the names of its tensors. What could be written but not be read again is refused here."""
    exported = stored.exported
    names = {
        "state": tensors.add(exported.state_dict),
        "constants": tensors.add(exported.constants),
    }
    try:
        with quiet_loggers(serialize.__name__):
            artifact = serialize.serialize(_without_numbers(exported))
        graph = strip_metadata(json.loads(artifact.exported_program))
        validate_program(graph, _namespaces(exported))
    except CheckpointError as error:
        raise UnsupportedError(f"The program cannot be saved: {error}.") from error
    except Exception as error:
        raise UnsupportedError(
            "The program cannot be saved: torch cannot write it as plain values."
            f" {_first_line(error)}"
        ) from error
    return graph, names


def _without_numbers(exported: ExportedProgram) -> ExportedProgram:
    """The same graph around tensors without data: torch pickles whatever a program holds, some versions unasked, and here numbers are written elsewhere."""
    bare = copy.copy(exported)
    bare._state_dict = {name: _bare(value) for name, value in exported.state_dict.items()}
    bare._constants = {name: _bare(value) for name, value in exported.constants.items()}
    bare._example_inputs = None
    return bare


def _bare(tensor: Any) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    # torch looks whether a parameter is one.
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
        raise CheckpointError("its options are no mapping")
    places = range(len(contents["programs"]))
    known = {_CONTENTS, *map(_graph_part, places), *map(_plan_part, places), PART}
    if odd := archive.names ^ known:
        raise CheckpointError(f"the part {min(odd)!r} is there without reason, or missing")
    return contents


def _artefact(
    archive: ArchiveReader,
    contents: dict[str, Any],
    device: torch.device | None,
    custom_ops: Collection[str],
) -> SavedModel:
    graphs = [
        _graph(archive.json(_graph_part(place)), contents["torch"], device, custom_ops)
        for place in range(len(contents["programs"]))
    ]
    tensors = TensorReader(archive, contents["tensors"], device)
    programs = []
    for place, (graph, names) in enumerate(zip(graphs, contents["programs"], strict=True)):
        exported = _program(graph, tensors.named(names["state"]), tensors.named(names["constants"]))
        programs.append(SavedProgram(exported, archive.json(_plan_part(place))))
    return SavedModel(tuple(programs), contents["options"])


def _graph(
    plain: Any, written_by: str, device: torch.device | None, custom_ops: Collection[str]
) -> schema.ExportedProgram:
    if plain["schema_version"]["major"] != schema.SCHEMA_VERSION[0]:
        raise CheckpointError(
            f"its graph was written by torch {written_by}, which this torch {torch.__version__}"
            " does not read; convert the model again"
        )
    return validate_program(_moved(plain, device), custom_ops)


def _program(
    graph: schema.ExportedProgram,
    state: dict[str, torch.Tensor],
    constants: dict[str, torch.Tensor],
) -> ExportedProgram:
    """Have torch rebuild an admitted graph around tensors that are already there: it is given nothing to unpickle."""
    with quiet_loggers(serialize.__name__), warnings.catch_warnings():
        # torch goes on with a graph whose code it could not make; nothing that was saved is one.
        warnings.filterwarnings("error", "Unable to execute the generated python source code")
        exported = serialize.ExportedProgramDeserializer().deserialize(graph, state, constants)
    _check_fit(exported, {**constants, **state})
    exported._example_inputs = zeros_like_inputs(exported)
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


def _moved(graph: Any, device: torch.device | None) -> Any:
    """The graph with every device replaced."""
    if device is None:
        return graph
    if isinstance(graph, list):
        return [_moved(one, device) for one in graph]
    if not isinstance(graph, dict):
        return graph
    placed = {"type": device.type, "index": device.index}
    return {
        name: placed if name in {"device", "as_device"} else _moved(value, device)
        for name, value in graph.items()
    }


def _namespaces(exported: ExportedProgram) -> set[str]:
    """The namespaces of the custom ops that a program calls, bodies included."""
    modules = [
        one for one in exported.graph_module.modules() if isinstance(one, torch.fx.GraphModule)
    ]
    return {
        node.target.namespace
        for one in modules
        for node in one.graph.nodes
        if isinstance(node.target, OpOverload)
    } - {"aten"}


def _first_line(error: BaseException) -> str:
    """What went wrong in a line; torch tells it at the end of a long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300].rstrip(".")


def _graph_part(place: int) -> str:
    return f"programs/{place}/graph.json"


def _plan_part(place: int) -> str:
    return f"programs/{place}/plan.json"
