"""`mezzo.save_checkpoint` and `mezzo.load_checkpoint`: a whole training run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from mezzo._casting import map_tensors
from mezzo._errors import CheckpointError
from mezzo._files import atomic_writer
from mezzo.optim.state_dict import without_masters
from mezzo.prepare import (
    checkpoint_checks,
    checkpoint_file,
    checkpoint_folder,
    ranks,
    rng_state,
    run_state,
)
from mezzo.prepare.arguments import (
    Models,
    Optimizer,
    Optimizers,
    flat,
    models_of,
    optimizers_of,
    unwrapped,
)
from mezzo.prepare.decoration import (
    Accumulating,
    Decoration,
    decoration_of,
    has_exact_masters,
)
from mezzo.prepare.model_state_dict import decorations_of, exact_state_dict
from mezzo.prepare.rollback import rolled_back_on_error

FilePath = str | os.PathLike[str]

FORMAT, _VERSION = "mezzo checkpoint", 1
_RANDOM_STATES = "mezzo random states"


@runtime_checkable
class Step(Accumulating, Protocol):
    """The part of a training step that checkpoints use."""

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models, without wrappers."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers."""

    def run_state(self) -> dict[str, Any]:
        """Return scaler, schedulers and counters. Raises with accumulated gradients."""

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Continue from the counters, scaler and schedulers of a saved step."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. A state that does not fit raises before anything changes."""


def save_checkpoint(
    path: FilePath,
    model: Models | None = None,
    optimizer: Optimizers | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    *,
    step: Step | Any = None,
    **extra: Any,
) -> None:
    """Save a training run, with the states of all random number generators.

    The file is written atomically: an interrupted save leaves the old file unchanged. Weights with
    exact masters are saved as float32 values, so that a checkpoint can be loaded at another level.
    The file can also be read with `torch.load`.

    With several processes, call this on every rank with the same path. Of models in
    `DistributedDataParallel` rank 0 writes the file, and the others wait for it and write their
    random states beside it (`run.pt.rank1`); if rank 0 alone saves, these are missing. Models with
    sharded parameters are saved to a folder by `torch.distributed.checkpoint`, which any number of
    ranks can load. The folder gets its name when it is complete.

    Args:
        path: The file to write; the folder, if parameters are sharded.
        model: The model, or a list of models.
        optimizer: The optimizer, or a list of optimizers.
        scaler: A `mezzo.GradScaler`, or any object with `state_dict()`.
        scheduler: A learning rate scheduler, or a list of schedulers.
        step: A `mezzo.TrainStep` instead of the arguments above. It is saved with its counters and
            the gradients that it has accumulated; between two updates its parts alone cannot be
            saved, and with several processes neither. Any other value, such as `step=1000`, is
            saved like `**extra`.
        **extra: More values to save: numbers, strings, tensors, and lists and dictionaries of them.

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
        models, optimizers, "call save_checkpoint(path, step=step), which saves them"
    )
    if any(decoration.lent for decoration in _decorations((), optimizers)):
        raise CheckpointError(
            "The optimizer's model holds averaged weights inside `with ema.applied()`, from which"
            " training cannot continue. Save the run outside of the `with`, or the averaged model"
            " alone: save_checkpoint(path, model)."
        )
    if checkpoint_folder.is_sharded(models if step is None else step.models, optimizers):
        _save_folder(path, models, optimizers, scaler, scheduler, step, extra)
        return
    parts = (model, optimizer, scaler, scheduler)
    if not ranks.is_replicated(_with_wrappers(model, step)):
        _write(path, _parts(*parts, step, extra))
        return
    if step is not None:
        # Raises with accumulated gradients: those of the other ranks would be lost.
        step.run_state()
    if ranks.rank():
        _save_random_states(path)
        return
    save_id = ""
    try:
        new_id = token_hex(8)
        of_ranks = {"count": ranks.world_size(), "id": new_id}
        _write(path, {**_parts(*parts, step, extra), "ranks": of_ranks})
        save_id = new_id
    finally:
        ranks.announce_save(path, save_id)


def _parts(
    model: Models | None,
    optimizer: Optimizers | None,
    scaler: Any,
    scheduler: Any,
    step: Step | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of a file."""
    models = _models(model)
    states = [optimizer_state(one, models) for one in optimizers_of(optimizer)]
    return {
        "step": None if step is None else step.state_dict(),
        "model": None if model is None else [exact_state_dict(one) for one in models],
        "optimizer": None if optimizer is None else states,
        "scaler": None if scaler is None else [scaler.state_dict()],
        "scheduler": _states_of(scheduler),
        "rng": rng_state.capture_rng_state(),
        "extra": extra,
    }


def _with_wrappers(model: Models | None, step: Step | None) -> tuple[Any, ...]:
    """Return models with the wrappers that they were passed in."""
    return tuple(flat(model)) if step is None else (getattr(step, "model", None),)


def _states_of(parts: Any) -> list[dict[str, Any]] | None:
    return None if parts is None else [one.state_dict() for one in flat(parts)]


def _write(path: FilePath, parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        _refuse_unreadable(name, part)
    with atomic_writer(path) as file:
        try:
            checkpoint_file.save({"format": FORMAT, "version": _VERSION, **parts}, file)
        except CheckpointError as error:
            raise CheckpointError(
                f"{os.fspath(path)!r} could not be loaded again: {error}. Save tensors as they are"
                " before expand()."
            ) from None


def _save_random_states(path: FilePath) -> None:
    """Wait for the file that rank 0 writes, and write the random states of this rank beside it."""
    state = rng_state.capture_rng_state()
    save_id = ranks.wait_for_save(path)
    with atomic_writer(ranks.rng_file(path)) as file:
        checkpoint_file.save({"format": _RANDOM_STATES, "id": save_id, "rng": state}, file)


def _save_folder(
    path: FilePath,
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    scaler: Any,
    scheduler: Any,
    step: Step | None,
    extra: dict[str, Any],
) -> None:
    """Save sharded models and their optimizers to a folder. All ranks must call this."""
    if step is not None:
        models, optimizers = step.models, step.optimizers
    if optimizers and not models:
        raise CheckpointError(
            "The state of an optimizer of sharded parameters is saved by their names. Pass the"
            " model too: save_checkpoint(path, model, optimizer)."
        )
    run = {
        "counts": {"model": len(models), "optimizer": len(optimizers)},
        "step": None if step is None else step.run_state(),
        "scaler": None if scaler is None else [scaler.state_dict()],
        "scheduler": _states_of(scheduler),
        "extra": extra,
    }
    for name, part in run.items():
        _refuse_unreadable(name, part)
    checkpoint_folder.save(Path(path), models, optimizers, run_state.pack(run))


def load_checkpoint(
    path: FilePath,
    model: Models | None = None,
    optimizer: Optimizers | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    *,
    step: Step | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved into the objects that are passed.

    The states of random number generators are restored too. Checksums and contents of the file are
    checked before anything changes, and an error during the load restores everything: a run is
    never half loaded. The file is read with `torch.load(weights_only=True)`. A folder of sharded
    parameters is read by `torch.distributed.checkpoint`, which uses pickle: load only folders that
    you trust. With several processes, call this on every rank.

    Args:
        path: A file or folder that `save_checkpoint` wrote.
        model: The model, or the list of models, to load into; None loads no model.
        optimizer: The optimizer, or the list of optimizers, to load into.
        scaler: The scaler to load into.
        scheduler: The scheduler, or the list of schedulers, to load into.
        step: The `mezzo.TrainStep` to load into, instead of the arguments above. From a file that
            was saved with `step=`, the model can be loaded alone too.
        strict: With False the model may have other parameters than the file, but not other shapes.

    Returns:
        The values that were saved as `**extra`.

    Raises:
        CheckpointError: The file is damaged, lacks a part, or does not fit.

    >>> import mezzo, tempfile
    >>> model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mezzo.save_checkpoint(f"{folder}/run.pt", model, epoch=3)
    ...     mezzo.load_checkpoint(f"{folder}/run.pt", other)["epoch"]
    3
    >>> torch.equal(model.weight, other.weight)
    True
    """
    if step is not None and not isinstance(step, Step):
        raise CheckpointError(
            f"step={step!r} is not a training step. Pass what mezzo.TrainStep or mezzo.train_step"
            " returned."
        )
    models, optimizers = _models(model), optimizers_of(optimizer)
    targets: dict[str, tuple[Any, ...]] = {
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
        "call step.flush() first, or load_checkpoint(path, step=step) of a saved step",
    )
    if any(decoration.lent for decoration in _decorations(models, optimizers)):
        raise CheckpointError(
            "The model holds averaged weights inside `with ema.applied()`, whose end would undo the"
            " load. Load outside of the `with`."
        )
    if checkpoint_folder.is_folder(Path(path)):
        return _load_folder(path, targets, strict=strict)
    if checkpoint_folder.is_sharded(models if step is None else step.models, optimizers):
        raise CheckpointError(
            f"{os.fspath(path)!r} is not a folder, and the parameters are sharded. Load it before"
            " the model is sharded, or pass a folder that save_checkpoint wrote of sharded"
            " parameters."
        )
    parts = _read(path)
    pairs = checkpoint_checks.match_parts(os.fspath(path), parts, targets)
    checkpoint_checks.check_fit(pairs, strict=strict)
    own_rng = _own_random_states(path, parts)
    rng_state.check_rng_state(own_rng)
    # A step rolls back its own parts.
    with rolled_back_on_error(models, optimizers, (*targets["scaler"], *targets["scheduler"])):
        for name, of_part in pairs.items():
            for target, state in of_part:
                options = {"strict": strict} if name == "model" else {}
                with _as_checkpoint_error(os.fspath(path), name, target):
                    target.load_state_dict(state, **options)
        rng_state.restore_rng_state(own_rng)
    extra: dict[str, Any] = parts["extra"]
    return extra


def _own_random_states(path: FilePath, parts: dict[str, Any]) -> dict[str, Any]:
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


def _load_folder(
    path: FilePath, targets: dict[str, tuple[Any, ...]], *, strict: bool
) -> dict[str, Any]:
    """Load a folder of sharded parameters. All ranks must call this."""
    folder, name = checkpoint_folder.find(Path(path)), os.fspath(path)
    run, restore_own_rng_state = run_state.unpack(checkpoint_folder.load_run(folder))
    step = targets["step"]
    if step and run["step"] is None:
        raise CheckpointError(
            f"{name!r} was saved without a step. Pass what was saved: the model, the optimizer, the"
            " scaler and the scheduler."
        )
    if step:
        parts = {"model": step[0].models, "optimizer": step[0].optimizers}
        targets = {**targets, **parts, "step": ()}
    pairs = checkpoint_checks.match_parts(name, _parts_of_run(run), targets)
    for scheduler, state in pairs["scheduler"]:
        checkpoint_checks.refuse_other_scheduler(scheduler, state)
    models, optimizers = targets["model"], targets["optimizer"]
    with rolled_back_on_error(models, optimizers, (*targets["scaler"], *targets["scheduler"])):
        with _as_checkpoint_error(name, "model or optimizer", models[0] if models else None):
            checkpoint_folder.load(folder, models, optimizers, strict=strict)
        for part in ("scaler", "scheduler"):
            for target, state in pairs[part]:
                with _as_checkpoint_error(name, part, target):
                    target.load_state_dict(state)
        if step:
            step[0].load_run_state(run["step"])
        restore_own_rng_state()
    extra: dict[str, Any] = run["extra"]
    return extra


def _parts_of_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a folder as lists, as `match_parts` expects them."""
    counts, own = run["counts"], run["step"] or {"scaler": None, "schedulers": []}
    return {
        "step": None,
        "model": [None] * counts["model"] or None,
        "optimizer": [None] * counts["optimizer"] or None,
        "scaler": run["scaler"] if own["scaler"] is None else [own["scaler"]],
        "scheduler": run["scheduler"] or own["schedulers"] or None,
    }


@contextmanager
def _as_checkpoint_error(path: str, name: str, target: Any) -> Iterator[None]:
    """Raise `CheckpointError` with the name of the part for every other error."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The {name} in {path!r} cannot be loaded into this {type(target).__name__}:"
            f" {error!s:.500} Nothing was changed. Pass a checkpoint of the same run."
        ) from error


def _read(path: FilePath) -> dict[str, Any]:
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


def _refuse_both(step: Step | None, parts: tuple[Any, ...]) -> None:
    if step is not None and any(part is not None for part in parts):
        raise CheckpointError(
            "step= includes its models, optimizers, scaler and schedulers. Pass the step alone, or"
            " its parts without it."
        )


def _refuse_mid_accumulation(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...], remedy: str
) -> None:
    """Raise if the parts belong to a training step that has accumulated gradients."""
    for decoration in _decorations(models, optimizers):
        for step in decoration.training_steps:
            if step.position:
                raise CheckpointError(
                    "The model and the optimizer belong to a step that has accumulated the"
                    f" gradients of {step.position} calls since its last update, which are not part"
                    f" of them: {remedy}."
                )


def _decorations(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...]
) -> set[Decoration]:
    of_optimizers = (decoration_of(one) for one in optimizers)
    return {
        *(one for model in models for one in decorations_of(model)),
        *(one for one in of_optimizers if one is not None),
    }


def _models(argument: Models | None) -> tuple[nn.Module, ...]:
    return () if argument is None else tuple(map(unwrapped, models_of(argument)))


def optimizer_state(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> dict[str, Any]:
    """Return an optimizer's state, without masters if these models are saved with exact values."""
    state = optimizer.state_dict()
    return without_masters(state) if has_exact_masters(optimizer, models) else state


def _refuse_unreadable(name: str, part: Any) -> None:
    """Raise for a value that could be written and not be read: tried without tensor contents."""
    buffer = BytesIO()
    try:
        checkpoint_file.save(map_tensors(part, _empty), buffer)
        checkpoint_file.load(buffer)
    except Exception as error:
        raise CheckpointError(
            f"The part {name!r} holds a value that torch.load(weights_only=True) does not read:"
            f" {error.__cause__ or error} Save plain numbers, strings, tensors, and lists and"
            " dictionaries of them."
        ) from error


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    # Later versions of torch have no attribute `is_quantized`.
    if getattr(tensor, "is_quantized", False) or tensor.is_nested or tensor.is_meta:
        raise TypeError(
            f"a tensor of {tensor.dtype} on {tensor.device}, quantized, nested or without values."
        )
    return torch.empty(0)
