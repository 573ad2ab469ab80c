"""`mezzo.save_checkpoint`, `load_checkpoint` and `latest_checkpoint`: whole training runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import nn

from mezzo._errors import CheckpointError
from mezzo.optim.state_dict import without_masters
from mezzo.prepare import (
    checkpoint_checks,
    checkpoint_file,
    checkpoint_folder,
    checkpoint_parts,
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
from mezzo.prepare.checkpoint_parts import FORMAT, FilePath
from mezzo.prepare.decoration import Decoration, decoration_of, has_exact_masters
from mezzo.prepare.model_state_dict import decorations_of, exact_state_dict
from mezzo.prepare.rollback import rolled_back_on_error
from mezzo.prepare.run_state import Step


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
        step: A `mezzo.TrainStep` instead of the arguments above, but for a `scheduler` that you
            step yourself, such as one for each epoch. It is saved with its counters and the
            gradients that it has accumulated; between two updates its parts alone cannot be saved,
            and with several processes neither. Any other value, such as `step=1000`, is saved like
            `**extra`.
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
    run_state.refuse_parts_of(step, (model, optimizer, scaler), scheduler)
    _refuse_mid_accumulation(
        models, optimizers, "call save_checkpoint(path, step=step), which saves them"
    )
    if any(decoration.holds_averages for decoration in _decorations((), optimizers)):
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
        checkpoint_parts.write(path, _parts(*parts, step, extra))
        return
    if step is not None:
        # Raises with accumulated gradients: those of the other ranks would be lost.
        step.run_state()
    if ranks.rank():
        checkpoint_parts.save_random_states(path)
        return
    save_id = ""
    try:
        new_id = token_hex(8)
        of_ranks = {"count": ranks.world_size(), "id": new_id}
        checkpoint_parts.write(path, {**_parts(*parts, step, extra), "ranks": of_ranks})
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
    states = [optimizer_state(member, models) for member in optimizers_of(optimizer)]
    return {
        "step": None if step is None else step.state_dict(),
        "model": None if model is None else [exact_state_dict(module) for module in models],
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
    return None if parts is None else [part.state_dict() for part in flat(parts)]


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
    extra, extra_shards = checkpoint_folder.take_shards(extra)
    run = {
        "counts": {"model": len(models), "optimizer": len(optimizers)},
        "step": None if step is None else step.run_state(),
        "scaler": None if scaler is None else [scaler.state_dict()],
        "scheduler": _states_of(scheduler),
        "extra": extra,
    }
    for name, part in run.items():
        checkpoint_parts.refuse_unreadable(name, part)
    checkpoint_folder.save(Path(path), models, optimizers, run_state.pack(run), extra_shards)


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
        step: The `mezzo.TrainStep` to load into, instead of the arguments above, but for a
            `scheduler` that you step yourself. From a file that was saved with `step=`, the model
            can be loaded alone too.
        strict: With False the model may have other parameters than the file, but not other shapes.

    Returns:
        The values that were saved as `**extra`. Sharded tensors among them are whole, on the CPU.

    Raises:
        CheckpointError: The file is damaged, lacks a part, or does not fit.

    >>> import mezzo, tempfile, torch
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
    run_state.refuse_parts_of(step, (model, optimizer, scaler), scheduler)
    _refuse_mid_accumulation(
        models,
        optimizers,
        "call step.flush() first, or load_checkpoint(path, step=step) of a saved step",
    )
    if any(decoration.holds_averages for decoration in _decorations(models, optimizers)):
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
    return _load_file(path, targets, strict=strict)


def _load_file(
    path: FilePath, targets: dict[str, tuple[Any, ...]], *, strict: bool
) -> dict[str, Any]:
    """Load a file: read and check all of it, then load each part."""
    parts, name = checkpoint_parts.read(path), os.fspath(path)
    pairs = checkpoint_checks.match_parts(name, parts, targets)
    checkpoint_checks.check_fit(pairs, strict=strict)
    own_rng = checkpoint_parts.own_random_states(path, parts)
    rng_state.check_rng_state(own_rng)
    models, optimizers = targets["model"], targets["optimizer"]
    # A step rolls back its own parts.
    with rolled_back_on_error(models, optimizers, (*targets["scaler"], *targets["scheduler"])):
        for part, pairs_of_part in pairs.items():
            for target, state in pairs_of_part:
                options = {"strict": strict} if part == "model" else {}
                with _as_checkpoint_error(name, part, target):
                    target.load_state_dict(state, **options)
        rng_state.restore_rng_state(own_rng)
    extra: dict[str, Any] = parts["extra"]
    return extra


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
    return checkpoint_folder.load_extra(folder, run["extra"])


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
    of_optimizers = map(decoration_of, optimizers)
    return {
        *(decoration for model in models for decoration in decorations_of(model)),
        *(decoration for decoration in of_optimizers if decoration is not None),
    }


def _models(argument: Models | None) -> tuple[nn.Module, ...]:
    return () if argument is None else tuple(map(unwrapped, models_of(argument)))


def optimizer_state(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> dict[str, Any]:
    """Return an optimizer's state, without masters if these models are saved with exact values."""
    state = optimizer.state_dict()
    return without_masters(state) if has_exact_masters(optimizer, models) else state


# -- find the last checkpoint ----------------------------------------------------------------------


def latest_checkpoint(folder: FilePath) -> Path | None:
    """Return the checkpoint in a folder that was saved last; None if there is none.

    Incomplete checkpoints, such as interrupted saves or files that are being copied, are skipped,
    and so are other files. Of checkpoints that were saved at the same time, the one with the larger
    number in its name counts as later.

    Args:
        folder: The folder that holds the files or folders of `save_checkpoint`. It need not exist.

    >>> import mezzo, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         mezzo.save_checkpoint(f"{folder}/{step}.pt", torch.nn.Linear(1, 1))
    ...     mezzo.latest_checkpoint(folder).name
    '10.pt'
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{str(path)!r} is a file. Pass the folder that holds checkpoints.")
    entries = path.iterdir() if path.is_dir() else ()
    for entry in sorted(filter(_is_visible, entries), key=_age, reverse=True):
        if _is_complete(entry):
            return entry
    return None


def _is_visible(entry: Path) -> bool:
    return not entry.name.startswith(".")


def _age(entry: Path) -> tuple[int, list[int], str]:
    """Return when an entry was written, and the numbers in its name."""
    numbers = [int(digits) for digits in re.findall(r"\d+", entry.name)]
    try:
        return entry.stat().st_mtime_ns, numbers, entry.name
    except OSError:
        # Removed since the folder was listed.
        return 0, numbers, entry.name


def _is_complete(entry: Path) -> bool:
    if not entry.is_file():
        return checkpoint_folder.is_complete(entry)
    with entry.open("rb") as file:
        return checkpoint_file.is_complete(file, FORMAT)
