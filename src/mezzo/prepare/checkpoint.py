"""`mezzo.save_checkpoint` and `load_checkpoint`: a whole run in one file, which is there whole or not at all."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mezzo._casting import map_tensors
from mezzo._errors import CheckpointError
from mezzo._files import atomic_writer
from mezzo.optim.kinds import KINDS
from mezzo.optim.saved import without_masters
from mezzo.prepare import fitting, rng
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.given import Models, Optimizer, Optimizers, flat, models_of, optimizers_of
from mezzo.prepare.weight_hooks import exact_state_dict

Place = str | os.PathLike[str]

_FORMAT, _VERSION = "mezzo checkpoint", 1


def save_checkpoint(
    path: Place, model: Models | None = None, optimizer: Optimizers | None = None, scaler: Any = None, scheduler: Any = None, **extra: Any
) -> None:
    """Save a run: models, optimizers, scaler, schedulers, every random generator, and what else you name.

    A kill in the middle leaves the old file as it was. Weights are saved as exact float32 values where masters keep them, so that a checkpoint moves between
    levels.

    >>> import mezzo, tempfile
    >>> model = nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mezzo.save_checkpoint(f"{folder}/run.pt", model, epoch=3)
    ...     mezzo.load_checkpoint(f"{folder}/run.pt", model)
    {'epoch': 3}
    """
    models, optimizers = _models(model), optimizers_of(optimizer)
    parts = {
        "model": None if model is None else [_model_state(one) for one in models],
        "optimizer": None if optimizer is None else [_optimizer_state(one, models) for one in optimizers],
        "scaler": None if scaler is None else [scaler.state_dict()],
        "scheduler": None if scheduler is None else [one.state_dict() for one in flat(scheduler)],
        "rng": rng.capture(),
        "extra": extra,
    }
    for name, part in parts.items():
        _refuse_unreadable(name, part)
    with atomic_writer(path) as file:
        torch.save({"format": _FORMAT, "version": _VERSION, **parts}, file)


def load_checkpoint(
    path: Place, model: Models | None = None, optimizer: Optimizers | None = None, scaler: Any = None, scheduler: Any = None, *, strict: bool = True
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved into what is passed, and the random generators; what else was saved is returned.

    Everything is checked first: an error leaves all as it was. With `strict=False` the model may have other parameters than the file, but not other shapes.
    """
    parts = _read(path)
    asked = {
        "scaler": () if scaler is None else (scaler,),
        "model": _models(model),
        "optimizer": optimizers_of(optimizer),
        "scheduler": () if scheduler is None else tuple(flat(scheduler)),
    }
    pairs = fitting.pairs(os.fspath(path), parts, asked)
    fitting.check(pairs, strict=strict)
    for name, several in pairs.items():
        # The scaler comes first: it reads its state whole or not at all, by rules of its own.
        for one, state in several:
            one.load_state_dict(state, **({"strict": strict} if name == "model" else {}))
    rng.restore(parts["rng"])
    extra: dict[str, Any] = parts["extra"]
    return extra


def _read(path: Place) -> dict[str, Any]:
    name = os.fspath(path)
    # Opened here, so that a file that is not there is told from one that torch does not read.
    with Path(path).open("rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            # Without torch's own words, which advise to load without safeguards; they are the cause and are shown above.
            raise CheckpointError(f"{name!r} is no mezzo checkpoint, or is damaged: torch cannot read it. Pass a file that save_checkpoint wrote.") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{name!r} was not written by mezzo.save_checkpoint. Read it with torch.load, and load its parts with their load_state_dict.")
    if content["version"] > _VERSION:
        raise CheckpointError(f"{name!r} has version {content['version']}, and this mezzo reads up to {_VERSION}. Load it with a newer mezzo.")
    return content


def _models(words: Models | None) -> tuple[nn.Module, ...]:
    """The models themselves, not what was wrapped around them: a run on one device reads what a run on several wrote."""
    models = () if words is None else models_of(words)
    return tuple(one.module if isinstance(one, DistributedDataParallel | DataParallel) else one for one in models)


def _model_state(model: nn.Module) -> dict[str, Any]:
    found = {decoration for module in model.modules() if (decoration := decoration_of(module)) is not None}
    return exact_state_dict(model, [decoration.weights for decoration in found])


def _optimizer_state(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> dict[str, Any]:
    state, decoration = optimizer.state_dict(), decoration_of(optimizer)
    if decoration is not None and KINDS[decoration.plan.master].exact and all(one in models for one in decoration.models):
        # The exact weights are in the model's state: not twice.
        return without_masters(state)
    return state


def _refuse_unreadable(name: str, part: Any) -> None:
    """Refuse what could be written but not be read again: found out with the same structure around empty tensors."""
    buffer = BytesIO()
    try:
        torch.save(map_tensors(part, lambda _: torch.empty(0)), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"The part {name!r} holds something that torch.load(weights_only=True) does not read: {error} "
            "Save plain numbers, strings, tensors, and lists and dictionaries of them."
        ) from error
