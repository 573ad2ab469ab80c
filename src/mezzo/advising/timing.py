"""Time functions on a device: medians of runs that alternate between them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mezzo._torch import TorchDispatchMode

_RUNS = 3
"""Runs whose ops are timed."""
_SHORTEST = 5e-3
"""Seconds that a timing on a device takes at least, in several calls if one is shorter."""
_MOST_CALLS = 100
_UNSTEADY, _ROUNDS_TO_JUDGE = 1.5, 5


def interleaved_medians(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    rounds: int = 7,
    budget: float = math.inf,
) -> list[float]:
    """Return the median seconds of each function; see `interleaved_times`.

    >>> first, second = interleaved_medians(
    ...     [lambda: sum(range(10)), lambda: sum(range(100_000))], torch.device("cpu")
    ... )
    >>> first < second
    True
    """
    return [median(taken) for taken in interleaved_times(runs, device, rounds, budget)]


def interleaved_times(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    rounds: int = 7,
    budget: float = math.inf,
) -> list[list[float]]:
    """Return the seconds of each function in each round.

    Each round runs all of them, so that a change of the clock or of the load meets all alike. There
    are fewer rounds, at least one, if they would take longer than the budget in seconds.
    """
    once = sum(time_once(run, device) for run in runs)
    calls = [1] * len(runs)
    if once * (rounds + 2) <= budget:
        calls = [calls_at_once(time_once(run, device), device) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(max(1, min(rounds, int(budget / once - 1) if budget < math.inf else rounds))):
        for run, count, taken in zip(runs, calls, times, strict=True):
            taken.append(time_once(run, device, count) / count)
    return times


def unsteady(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the second fastest and the second slowest round if they differ by half or more.

    Something else uses the machine then. None also for fewer than five rounds, which cannot tell.

    >>> unsteady([1.0, 1.1, 1.2, 1.1, 9.0]), unsteady([1.0, 1.0, 2.0, 3.0, 9.0])
    (None, (1.0, 3.0))
    """
    if len(seconds) < _ROUNDS_TO_JUDGE:
        return None
    low, *_, high = sorted(seconds)[1:-1]
    return (low, high) if high >= _UNSTEADY * low else None


def calls_at_once(seconds: float, device: torch.device) -> int:
    """Return how many calls to time at once, given the seconds of one.

    In a training loop the host launches a step while the device computes the one before. A call
    that is timed alone has to wait for both.

    >>> calls_at_once(1e-3, torch.device("cuda")), calls_at_once(1e-3, torch.device("cpu"))
    (5, 1)
    """
    if device.type == "cpu":
        return 1
    return max(1, min(_MOST_CALLS, round(_SHORTEST / seconds)))


def time_once(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the seconds of one or several calls, until the device has finished them."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_ops(
    run: Callable[[], object], device: torch.device, runs: int = _RUNS
) -> dict[str, float]:
    """Return the seconds that each ATen op takes in one run: of its kernels on a GPU.

    >>> x = torch.ones(8, 8)
    >>> sorted(time_ops(lambda: (x @ x).relu(), torch.device("cpu")))
    ['mm', 'relu']
    """
    tables = [_profile(run, device) if device.type == "cuda" else _time(run) for _ in range(runs)]
    return {op: median(table.get(op, 0.0) for table in tables) for op in tables[0]}


def _time(run: Callable[[], object]) -> dict[str, float]:
    timer = _OpTimer()
    with timer:
        run()
    return timer.seconds


def _profile(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    # Without acc_events the second profile of a process warns.
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiled:
        run()
        synchronize(device)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        # Kernels are listed beside the ops that launch them, and would count twice.
        if event.key.startswith("aten::") and event.self_device_time_total:
            seconds[event.key.removeprefix("aten::")] += event.self_device_time_total / 1e6
    return seconds


class _OpTimer(TorchDispatchMode):
    """Times each op on the host. `torch.profiler` would write to stderr, and take longer."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        taken = time.perf_counter() - begin
        if not func.is_view:
            self.seconds[func.overloadpacket.__name__] += taken
        return result
