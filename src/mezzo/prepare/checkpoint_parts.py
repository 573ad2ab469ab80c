"""Parts of a run in a checkpoint file: write and read them, and random states of other ranks."""

from __future__ import annotations

import os
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo._errors import CheckpointError
from mezzo._files import atomic_writer
from mezzo.prepare import checkpoint_file, ranks, rng_state

FilePath = str | os.PathLike[str]

FORMAT, _VERSION = "mezzo checkpoint", 1
_RANDOM_STATES = "mezzo random states"


def write(path: FilePath, parts: dict[str, Any]) -> None:
    """Write the parts of a run to a file, atomically."""
    for name, part in parts.items():
        refuse_unreadable(name, part)
    with atomic_writer(path) as file:
        try:
            checkpoint_file.save({"format": FORMAT, "version": _VERSION, **parts}, file)
        except CheckpointError as error:
            raise CheckpointError(
                f"{os.fspath(path)!r} could not be loaded again: {error}. Save tensors as they are"
                " before expand()."
            ) from None


def refuse_unreadable(name: str, part: Any) -> None:
    """Raise for a value that could be written but not read; tensors are tried without content."""
    buffer = BytesIO()
    try:
        checkpoint_file.save(map_tensors(part, _empty), buffer)
        checkpoint_file.load(buffer)
    except Exception as error:
        cause = str(error.__cause__ or error).rstrip(".")
        raise CheckpointError(
            f"The part {name!r} holds a value that torch.load(weights_only=True) does not read:"
            f" {cause}. Save plain numbers, strings, tensors, and"
            " lists and dictionaries of them; or declare a class that you trust before saving and"
            " loading: torch.serialization.add_safe_globals([Class])."
        ) from error


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    # Later versions of torch have no attribute `is_quantized`.
    if getattr(tensor, "is_quantized", False) or tensor.is_nested or tensor.is_meta:
        raise TypeError(
            f"a tensor of {tensor.dtype} on {tensor.device}, quantized, nested or without values."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a {str(tensor.layout).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}."
            " Register such a buffer with persistent=False"
        )
    return torch.empty(0)


def read(path: FilePath) -> dict[str, Any]:
    """Read the parts of a run from a file of `write`."""
    name = os.fspath(path)
    if Path(path).exists() and not Path(path).is_file():
        raise CheckpointError(
            f"{name!r} is not a regular file. Pass a file that save_checkpoint wrote."
        )
    with Path(path).open("rb") as file:
        try:
            content = checkpoint_file.load(file)
        except CheckpointError as error:
            raise CheckpointError(
                f"{name!r} is not a mezzo checkpoint, or is damaged: {error}. Pass a file that"
                " save_checkpoint wrote."
            ) from error.__cause__
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{name!r} was not written by mezzo.save_checkpoint. Read it with torch.load, and load"
            " its parts with their load_state_dict."
        )
    version = content.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise CheckpointError(
            f"{name!r} has version {version!r:.80}, and this mezzo reads up to {_VERSION}. Load it"
            " with a newer mezzo."
        )
    wrong = [part for part in ("rng", "extra") if not isinstance(content.get(part), dict)]
    if wrong:
        raise CheckpointError(
            f"{name!r} is damaged: {' and '.join(wrong)} in it is missing, or not what"
            " save_checkpoint writes. Pass another checkpoint."
        )
    return content


def save_random_states(path: FilePath) -> None:
    """Wait for the file that rank 0 writes, and write the random states of this rank beside it."""
    state = rng_state.capture_rng_state()
    save_id = ranks.wait_for_save(path)
    with atomic_writer(ranks.rng_file(path)) as file:
        checkpoint_file.save({"format": _RANDOM_STATES, "id": save_id, "rng": state}, file)


def own_random_states(path: FilePath, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the random states of this rank, those of rank 0 if there are no others."""
    states: dict[str, Any] = parts["rng"]
    saved = parts.get("ranks")
    if not isinstance(saved, dict) or ranks.world_size() == 1 or not ranks.rank():
        return states
    file = ranks.rng_file(path)
    if saved.get("count") == ranks.world_size() and file.is_file():
        with file.open("rb") as content:
            own = checkpoint_file.load(content)
        if isinstance(own, dict) and own.get("id") == saved.get("id"):
            return dict(own["rng"])
    warnings.warn(
        f"{os.fspath(path)!r} has no random states of rank {ranks.rank()} of {ranks.world_size()}:"
        " its random generators continue from those of rank 0. Call save_checkpoint on every rank"
        " to keep them.",
        UserWarning,
        stacklevel=3,
    )
    return states
