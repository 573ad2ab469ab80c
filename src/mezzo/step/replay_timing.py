"""Time eager calls and replays of a step: a captured graph is used only if it is not slower."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

import torch

REPLAYS = 3
"""Replays that are timed, of which the fastest counts: a single one may be interrupted."""
MARGIN = 1.02
"""A replay may take this much longer than an eager call, which is within the noise."""


class ReplayTiming:
    """The fastest eager call and the fastest replay of one captured graph, in seconds.

    >>> timing = ReplayTiming(torch.device("cpu"))
    >>> _ = timing.time_eager(lambda: time.sleep(0.001))
    >>> [timing.time_replay(lambda: time.sleep(0.01)) for _ in range(REPLAYS)]
    [None, None, None]
    >>> timing.judges_slower(), timing.judges_slower()
    (True, False)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager = self._replay = inf
        self._replays = 0
        self.is_running = True
        """Whether the next replay is timed."""
        self.is_judged = False
        """Whether replays were compared with eager calls."""

    def time_eager(self, run: Callable[[], Any]) -> Any:
        """Run an eager call and time it. This synchronizes."""
        returned, seconds = self._timed(run)
        self._eager = min(self._eager, seconds)
        return returned

    def time_replay(self, run: Callable[[], Any]) -> Any:
        """Run a replay; the first ones are timed, which synchronizes."""
        if not self.is_running:
            return run()
        returned, seconds = self._timed(run)
        self._replay = min(self._replay, seconds)
        self._replays += 1
        self.is_running = self._replays < REPLAYS
        return returned

    @property
    def is_due(self) -> bool:
        """Whether enough replays were timed, and they were not judged yet."""
        return not (self.is_running or self.is_judged)

    def judges_slower(self) -> bool:
        """Return once, after enough replays, whether they take longer than eager calls."""
        if not self.is_due:
            return False
        self.is_judged = True
        return self._replay > self._eager * MARGIN

    @property
    def reason(self) -> str:
        """Both durations, for a message."""
        replay, eager = self._replay * 1e3, self._eager * 1e3
        return f"a replay takes {replay:.2f} ms and an eager call {eager:.2f} ms"

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        self._wait()
        begin = time.perf_counter()
        returned = run()
        self._wait()
        return returned, time.perf_counter() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
