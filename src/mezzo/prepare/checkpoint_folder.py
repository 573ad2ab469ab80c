"""The folder of a sharded checkpoint: written and read by `torch.distributed.checkpoint`.

All ranks write their shards to a temporary folder, which rank 0 renames when it is complete. A
folder can be loaded by another number of ranks, and by one process without sharding.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzo._casting import map_tensors
from mezzo._errors import CheckpointError
from mezzo.optim.companion import without_companion, without_sample
from mezzo.optim.state_dict_checks import OUR_KEYS
from mezzo.prepare import ranks
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.decoration import has_exact_masters
from mezzo.prepare.model_state_dict import exact_state_dict
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import any_sharded, named_shards
from mezzo.scaling.mesh import is_sharded as is_shard

_METADATA = ".metadata"
"""The file that torch writes last."""
_RUN = "run"
_EXTRA = "extra."
"""Begins the names of the sharded tensors among the extra values; their number follows."""


def is_sharded(models: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()) -> bool:
    """Return whether a parameter of these models or optimizers is a DTensor.

    >>> is_sharded([nn.Linear(1, 1)])
    False
    """
    of_models = (parameter for model in models for _, parameter in named_shards(model))
    return any_sharded(chain(of_models, *map(parameters, optimizers)))


def is_complete(path: Path) -> bool:
    """Return whether a path is the folder of a complete checkpoint."""
    return (path / _METADATA).is_file()


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, or was one before a save was interrupted."""
    return path.is_dir() or (not path.exists() and is_complete(_old(path.absolute())))


# -- save ------------------------------------------------------------------------------------------


def save(
    path: Path,
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    packed: bytes,
    extra_shards: dict[str, torch.Tensor],
) -> None:
    """Save shards and a packed run state to a folder. All ranks must call this."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    content = {_RUN: packed, **extra_shards, **_states(models, optimizers)}
    target = path.absolute()
    temporary = target.with_name(f".{target.name}.part")
    ranks.on_rank_0(lambda: _prepare_target(path, target, temporary))
    with _without_warning():
        save_shards(content, checkpoint_id=temporary)
    ranks.on_rank_0(lambda: _replace(target, temporary))


def take_shards(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return extra values with an empty tensor for each sharded one, and these by name."""
    numbers = count()
    shards: dict[str, torch.Tensor] = {}

    def take(tensor: torch.Tensor) -> torch.Tensor:
        name = f"{_EXTRA}{next(numbers)}"
        if not is_shard(tensor):
            return tensor
        shards[name] = tensor
        return torch.empty(0)

    return map_tensors(extra, take), shards


def _prepare_target(path: Path, target: Path, temporary: Path) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {str(path)!r}: there is no directory {str(target.parent)!r}. Create it"
            " first."
        )
    if target.exists() and not is_complete(target):
        raise CheckpointError(
            f"{str(path)!r} exists and is not a sharded checkpoint, which is a folder. Pass another"
            " path."
        )
    shutil.rmtree(temporary, ignore_errors=True)


def _replace(target: Path, temporary: Path) -> None:
    """Rename a folder over another. If killed in between, `find` finds the old one."""
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


# -- load ------------------------------------------------------------------------------------------


def find(path: Path) -> Path:
    """Return the folder of a complete checkpoint; raise `CheckpointError` if there is none."""
    target = path.absolute()
    for folder in (target, _old(target)):
        if is_complete(folder):
            return folder
    raise CheckpointError(
        f"{str(path)!r} is not a regular file, and not the folder of a complete checkpoint. Pass"
        " what save_checkpoint wrote; mezzo.latest_checkpoint(folder) finds the last complete one."
    )


def load_run(path: Path) -> Any:
    """Return the packed run state of a folder."""
    content = {_RUN: b""}
    _read(path, content, strict=True)
    return content[_RUN]


def load(
    path: Path,
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    *,
    strict: bool,
) -> None:
    """Load shards into models and optimizers. All ranks must call this.

    Shapes are checked before anything is read.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_optimizer_state_dict,
    )

    content, saved = _states(models, optimizers), _saved_names(path)
    for name, state in content.items():
        if name.startswith("optimizer"):
            _drop_missing(state["state"], f"{name}.state.", saved)
            _refuse_more(path, name, _entry_names(name, state["state"]), saved)
        elif strict:
            _refuse_more(path, name, {f"{name}.{key}" for key in state}, saved)
    _read(path, content, strict=strict)
    for index, model in enumerate(models):
        model.load_state_dict(content[f"model{index}"], strict=strict)
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(
            _root(models),
            optimizer,
            content[f"optimizer{index}"],
            # Parameters without a gradient so far have no state.
            options=StateDictOptions(strict=False),
        )


def load_extra(path: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Return extra values with those that were sharded whole, on the CPU."""
    wholes = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype)
        for name, saved in _metadata(path).items()
        if name.startswith(_EXTRA)
    }
    if not wholes:
        return extra
    _read(path, wholes, strict=True)
    numbers = count()
    whole: dict[str, Any] = map_tensors(
        extra, lambda tensor: wholes.get(f"{_EXTRA}{next(numbers)}", tensor)
    )
    return whole


def _saved_names(path: Path) -> set[str]:
    return set(_metadata(path))


def _metadata(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return dict(FileSystemReader(path).read_metadata().state_dict_metadata)


def _drop_missing(states: dict[str, Any], prefix: str, saved: set[str]) -> None:
    """Remove what was not saved: the states of parameters that had none, and entries of mezzo.

    Norms have masters in 16-bit groups only.
    """
    present = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
    prefixes = {name[:place] for name in present for place in _dots(name)}
    for name in set(states) - prefixes:
        del states[name]
    for name, entries in states.items():
        for entry in OUR_KEYS & entries.keys():
            if f"{name}.{entry}" not in present:
                del entries[entry]


def _dots(name: str) -> list[int]:
    return [place for place, character in enumerate(name) if character == "."]


def _entry_names(name: str, states: dict[str, Any]) -> set[str]:
    return {f"{name}.state.{key}.{entry}" for key, entries in states.items() for entry in entries}


def _refuse_more(path: Path, name: str, own: set[str], saved: set[str]) -> None:
    """Raise for tensors in the checkpoint that the target lacks, which torch would not load."""
    prefix = f"{name}.state." if name.startswith("optimizer") else f"{name}."
    more = sorted(
        name
        for name in saved
        if name.startswith(prefix) and name not in own and name.rpartition(".")[2] not in OUR_KEYS
    )
    if more:
        raise CheckpointError(
            f"{str(path)!r} also has {more[0]!r}, which this {name} lacks, and {len(more) - 1} more"
            " such entries. Pass the models and optimizers that were saved, in the same order."
        )


def _read(path: Path, content: dict[str, Any], *, strict: bool) -> None:
    from torch.distributed.checkpoint import default_planner, state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with _without_warning():
            state_dict_loader.load(
                content,
                checkpoint_id=path,
                planner=default_planner.DefaultLoadPlanner(allow_partial_load=not strict),
            )
    except CheckpointException as error:
        number, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{str(path)!r} cannot be loaded: {reason!s:.500} (rank {number}). Pass the models and"
            " optimizers that were saved, in the same order."
        ) from error


@contextmanager
def _without_warning() -> Iterator[None]:
    """Do not warn that there is one process only, which needs no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        yield


# -- states ----------------------------------------------------------------------------------------


def _states(
    models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...]
) -> dict[str, dict[str, Any]]:
    """Return the states of models and optimizers, by the names of their parameters.

    An optimizer without a state gets one: its entries are what a load fills.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    states: dict[str, Any] = {
        f"model{index}": exact_state_dict(model) for index, model in enumerate(models)
    }
    for index, optimizer in enumerate(optimizers):
        state: dict[str, Any] = get_optimizer_state_dict(_root(models), optimizer)
        # With exact masters the models are saved with the values of these.
        drop = without_companion if has_exact_masters(optimizer, models) else without_sample
        state["state"] = {name: drop(entries) for name, entries in state["state"].items()}
        states[f"optimizer{index}"] = state
    return states


def _root(models: tuple[nn.Module, ...]) -> nn.Module:
    """Return a module that has all parameters of the models."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)
