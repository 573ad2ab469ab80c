"""`mezzo.save_checkpoint` and `load_checkpoint`: a whole run in one file, which is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from mezzo._casting import map_tensors
from mezzo._errors import CheckpointError
from mezzo._files import atomic_writer
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.optim.state_dict import without_masters
from mezzo.prepare import checkpoint_checks, checkpoint_file, rng_state
from mezzo.prepare.arguments import (
    Models,
    Optimizer,
    Optimizers,
    flat,
    models_of,
    optimizers_of,
    unwrapped,
)
from mezzo.prepare.decoration import Accumulating, Decoration, decoration_of
from mezzo.prepare.model_state_dict import decorations_of, exact_state_dict
from mezzo.prepare.rollback import rolled_back_on_error

Place = str | os.PathLike[str]

_FORMAT, _VERSION = "mezzo checkpoint", 1


@runtime_checkable
class Step(Accumulating, Protocol):
    """A training step of mezzo, as far as a checkpoint knows it."""

    def state_dict(self) -> dict[str, Any]:
        """All that the step needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; what does not fit is refused before anything changes."""


def save_checkpoint(
    path: Place,
    model: Models | None = None,
    optimizer: Optimizers | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    *,
    step: Step | Any = None,
    **extra: Any,
) -> None:
    """Save a run: models, optimizers, scaler, schedulers, every random generator, and what else you name.

    A kill in the middle leaves the old file as it was. Weights are saved as exact float32 values
    where masters keep them, so that a checkpoint moves between levels.

    A training step is saved whole, with its counters and the gradients that it has accumulated:
    `save_checkpoint(path, step=step)`, and `load_checkpoint(path, step=step)`. In the middle of an
    accumulation its parts alone are refused. `step=1000` is a value like any other.

    >>> import mezzo, tempfile
    >>> model = nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mezzo.save_checkpoint(f"{folder}/run.pt", model, epoch=3)
    ...     mezzo.load_checkpoint(f"{folder}/run.pt", model)
    {'epoch': 3}
    """
    if step is not None and not isinstance(step, Step):
        step, extra = None, {**extra, "step": step}
    models, optimizers = _models(model), optimizers_of(optimizer)
    _refuse_both(step, (model, optimizer, scaler, scheduler))
    _refuse_mid_accumulation(
        models, optimizers, "save_checkpoint(path, step=step) saves the step whole"
    )
    if any(decoration.lent for decoration in _decorations((), optimizers)):
        raise CheckpointError(
            "The optimizer's model holds averaged weights inside `with ema.applied()`, from which a"
            " run would not go on. Save the run outside of the `with`, or the averaged model alone:"
            " save_checkpoint(path, model)."
        )
    parts = {
        "step": None if step is None else step.state_dict(),
        "model": None if model is None else [exact_state_dict(one) for one in models],
        "optimizer": (
            None if optimizer is None else [optimizer_state(one, models) for one in optimizers]
        ),
        "scaler": None if scaler is None else [scaler.state_dict()],
        "scheduler": None if scheduler is None else [one.state_dict() for one in flat(scheduler)],
        "rng": rng_state.capture_rng_state(),
        "extra": extra,
    }
    for name, part in parts.items():
        _refuse_unreadable(name, part)
    with atomic_writer(path) as file:
        try:
            checkpoint_file.save({"format": _FORMAT, "version": _VERSION, **parts}, file)
        except CheckpointError as error:
            raise CheckpointError(
                f"{os.fspath(path)!r} could not be loaded again: {error}. Save expanded tensors as"
                " they are before expand()."
            ) from None


def load_checkpoint(
    path: Place,
    model: Models | None = None,
    optimizer: Optimizers | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    *,
    step: Step | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved into what is passed, and the random generators; what else was saved is returned.

    The file's checksums are verified, and everything in it is checked, before anything changes: an
    error leaves all as it was, also one that is raised halfway, by a `load_state_dict` of your own.
    With `strict=False` the model may have other parameters than the file, but not other shapes. Of
    a step that was saved whole, the model can be loaded alone too.
    """
    if step is not None and not isinstance(step, Step):
        raise CheckpointError(
            f"step={step!r} is no training step. Pass what mezzo.TrainStep or mezzo.train_step"
            " made."
        )
    parts, models, optimizers = _read(path), _models(model), optimizers_of(optimizer)
    asked = {
        "step": () if step is None else (step,),
        "scaler": () if scaler is None else (scaler,),
        "model": models,
        "optimizer": optimizers,
        "scheduler": () if scheduler is None else tuple(flat(scheduler)),
    }
    _refuse_both(step, (model, optimizer, scaler, scheduler))
    _refuse_mid_accumulation(
        models,
        optimizers,
        "call step.flush() first, or load_checkpoint(path, step=step) what was saved so",
    )
    if any(decoration.lent for decoration in _decorations(models, optimizers)):
        raise CheckpointError(
            "The model holds averaged weights inside `with ema.applied()`, whose end would undo the"
            " loading. Load outside of the `with`."
        )
    pairs = checkpoint_checks.match_parts(os.fspath(path), parts, asked)
    checkpoint_checks.check_fit(pairs, strict=strict)
    rng_state.check_rng_state(parts["rng"])
    # A step restores its own parts.
    with rolled_back_on_error(models, optimizers, (*asked["scaler"], *asked["scheduler"])):
        for name, several in pairs.items():
            for one, state in several:
                with _named(os.fspath(path), name, one):
                    one.load_state_dict(state, **({"strict": strict} if name == "model" else {}))
        rng_state.restore_rng_state(parts["rng"])
    extra: dict[str, Any] = parts["extra"]
    return extra


@contextmanager
def _named(path: str, name: str, one: Any) -> Iterator[None]:
    """Say which part of a file could not be loaded, whatever was raised."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The {name} in {path!r} cannot be loaded into this {type(one).__name__}:"
            f" {error!s:.500} Nothing was changed. Pass a checkpoint of the same run."
        ) from error


def _read(path: Place) -> dict[str, Any]:
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
                f"{name!r} is no mezzo checkpoint, or is damaged: {error}. Pass a file that"
                " save_checkpoint wrote."
            ) from error.__cause__
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
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


def _refuse_both(step: Step | None, parts: tuple[Any, ...]) -> None:
    if step is not None and any(part is not None for part in parts):
        raise CheckpointError(
            "step= brings its models, optimizers, scaler and schedulers with it. Pass the step"
            " alone, or its parts without it."
        )


def _refuse_mid_accumulation(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...], remedy: str
) -> None:
    """Refuse the parts of a training step that has gradients of an unfinished update: parts know nothing of these."""
    for decoration in _decorations(models, optimizers):
        for step in decoration.training_steps:
            if step.position:
                raise CheckpointError(
                    "The model and the optimizer belong to a step that has accumulated the"
                    f" gradients of {step.position} calls since its last update, which these parts"
                    f" do not hold: {remedy}."
                )


def _decorations(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...]
) -> set[Decoration]:
    found = (decoration_of(one) for one in optimizers)
    return {
        *(one for model in models for one in decorations_of(model)),
        *(one for one in found if one is not None),
    }


def _models(words: Models | None) -> tuple[nn.Module, ...]:
    return () if words is None else tuple(map(unwrapped, models_of(words)))


def optimizer_state(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> dict[str, Any]:
    """An optimizer's state, without masters whose exact values are in the states of these models: not twice."""
    state, decoration = optimizer.state_dict(), decoration_of(optimizer)
    if (
        decoration is not None
        and MASTER_FORMATS[decoration.plan.master].exact
        and all(one in models for one in decoration.models)
    ):
        return without_masters(state)
    return state


def _refuse_unreadable(name: str, part: Any) -> None:
    """Refuse what could be written but not be read again: found out with the same structure around empty tensors."""
    buffer = BytesIO()
    try:
        checkpoint_file.save(map_tensors(part, _empty), buffer)
        checkpoint_file.load(buffer)
    except Exception as error:
        raise CheckpointError(
            f"The part {name!r} holds something that torch.load(weights_only=True) does not read:"
            f" {error.__cause__ or error} Save plain numbers, strings, tensors, and lists and"
            " dictionaries of them."
        ) from error


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    # Later versions of torch have no quantized tensors.
    if getattr(tensor, "is_quantized", False) or tensor.is_nested or tensor.is_meta:
        raise TypeError(
            f"a tensor of {tensor.dtype} on {tensor.device}, quantized, nested or without values."
        )
    return torch.empty(0)
