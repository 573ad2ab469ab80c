"""The ranks of a process group: values and random states of all of them, and files of rank 0."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from mezzo._errors import CheckpointError
from mezzo._torch import default_store
from mezzo.prepare import rng_state

FilePath = str | os.PathLike[str]

_saves: Counter[str] = Counter()
"""Path → how often this process has saved to it as one rank of several."""


def rank() -> int:
    """Return the rank of this process; 0 without a process group.

    >>> rank(), world_size()
    (0, 1)
    """
    return distributed.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return distributed.get_world_size() if _has_group() else 1


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def gather(value: Any) -> list[Any]:
    """Return the value of every rank, by rank. All ranks must call this, and wait for each other.

    >>> gather("value")
    ['value']
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def on_rank_0(function: Callable[[], None]) -> None:
    """Call a function on rank 0 while the others wait. If it raises, all ranks raise."""
    problem = None
    if not rank():
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised below, after the others were notified
            problem = error
    message = gather(None if problem is None else str(problem))[0]
    if problem is not None:
        raise problem
    if message is not None:
        raise CheckpointError(f"Rank 0 has failed: {message}")


# -- random states ---------------------------------------------------------------------------------


def gather_rng_states() -> list[dict[str, Any]]:
    """Return the states of the random generators of every rank. All ranks must call this."""
    return gather(rng_state.capture_rng_state())


def check_rng_states(states: Any) -> None:
    """Raise `CheckpointError` unless these are the random states of one or more ranks."""
    if not isinstance(states, list) or not states:
        raise CheckpointError(
            f"The random states of the ranks are {states!r:.80}, not a list. Pass another"
            " checkpoint."
        )
    for state in states:
        rng_state.check_rng_state(state)


def restore_own_rng_state(states: list[dict[str, Any]]) -> None:
    """Restore the random generators of this rank, if as many ranks were saved as there are now."""
    if len(states) == world_size():
        rng_state.restore_rng_state(states[rank()])
    elif not rank():
        warnings.warn(
            f"The checkpoint has the random states of {len(states)} ranks, and there are"
            f" {world_size()} now: the random generators are left as they are. Weights and"
            " optimizer states are exact.",
            UserWarning,
            stacklevel=4,
        )


# -- one file, written by rank 0 -------------------------------------------------------------------


def is_replicated(models: Any) -> bool:
    """Return whether a model is in DistributedDataParallel, in one of several processes."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    return world_size() > 1 and any(isinstance(model, wrapper) for model in models)


def announce_save(path: FilePath, save_id: str) -> None:
    """Announce to the other ranks that rank 0 has written a file; "" if it could not.

    Does not wait: programs in which rank 0 alone saves must not block.
    """
    default_store().set(_next_key(path), save_id)


def wait_for_save(path: FilePath) -> str:
    """Wait until rank 0 has written a file as often as this rank was called; return its id."""
    store, name = default_store(), os.fspath(path)
    try:
        save_id = bytes(store.get(_next_key(path))).decode()
    except distributed.DistStoreError as error:
        raise CheckpointError(
            f"Rank 0 has not saved {name!r} within {store.timeout}. Of a model in"
            " DistributedDataParallel rank 0 writes the file: pass the same path on every rank, or"
            " save on rank 0 only."
        ) from error
    if not save_id:
        raise CheckpointError(f"Rank 0 could not write {name!r}. Its own error has the reason.")
    return save_id


def rng_file(path: FilePath) -> Path:
    """Return the file beside a checkpoint that holds the random states of this rank.

    >>> rng_file("run.pt").name
    'run.pt.rank0'
    """
    return Path(f"{os.fspath(path)}.rank{rank()}")


def _next_key(path: FilePath) -> str:
    name = str(Path(path).absolute())
    _saves[name] += 1
    # torchrun may keep its store when it restarts the ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"mezzo/checkpoint/{attempt}/{name}/{_saves[name]}"
