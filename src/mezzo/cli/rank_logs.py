"""The logs of the ranks of a script that torchrun starts: names, old files, their ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mezzo.observing.log import log_path

_WAIT = 10.0
"""Seconds that rank 0 waits for the logs of other ranks to end."""
_TAIL = 4096


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and how many there are."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables that torchrun sets.

        >>> Ranks.from_environment({"RANK": "1", "WORLD_SIZE": "2"})
        Ranks(rank=1, size=2)
        >>> Ranks.from_environment({})
        Ranks(rank=0, size=1)
        """
        rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
        if rank.isdigit() and size.isdigit() and int(rank) < int(size):
            return cls(int(rank), int(size))
        return cls()


def remove_old_logs(log: Path, ranks: Ranks) -> None:
    """Remove the logs of an earlier run that would be merged with this one's.

    Each rank removes its own, and rank 0 those that no rank of this run has.
    """
    log_path(log, ranks.rank, ranks.size).unlink(missing_ok=True)
    if ranks.rank == 0:
        current = set(_paths(log, ranks))
        for path in (log, *log.parent.glob(f"{log.stem}.rank*{log.suffix}")):
            if path not in current:
                path.unlink(missing_ok=True)


def all_logs(log: Path, ranks: Ranks) -> list[Path]:
    """Return the logs of the ranks that have one."""
    return [path for path in _paths(log, ranks) if path.exists()]


def wait_for_logs(log: Path, ranks: Ranks) -> None:
    """Wait a few seconds until the logs of all ranks have ended."""
    deadline = time.monotonic() + _WAIT
    while not all(map(_has_ended, _paths(log, ranks))) and time.monotonic() < deadline:
        time.sleep(0.05)


def _paths(log: Path, ranks: Ranks) -> list[Path]:
    return [log_path(log, rank, ranks.size) for rank in range(ranks.size)]


def _has_ended(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL, 0))
            last = file.read().rstrip().rpartition(b"\n")[2]
    except OSError:
        return False
    return b'"kind": "end"' in last
