"""Run work that may end the process in forked children."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

_LINE = 400
_ROOM = 2**31
SUPPORTED = (
    hasattr(os, "fork") and hasattr(os, "memfd_create") and Path("/proc/self/clear_refs").exists()
)


def in_children(count: int, work: Callable[[int], str], *, seconds: int = 20) -> dict[int, str]:
    """Return the result of `work` for each number below `count`.

    If a child dies, the result is "ended with" its signal, and another child continues.
    """
    file, results = os.memfd_create("outcomes"), dict[int, str]()
    while len(results) < count:
        start = len(results)
        child = os.fork()
        if not child:
            try:
                _work_through(range(start, count), work, seconds, file)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        lines = os.pread(file, _LINE * count, 0).decode()
        done = (lines[place : place + _LINE].strip() for place in range(0, len(lines), _LINE))
        results = dict(enumerate(done))
        if len(results) < count:
            code = os.waitstatus_to_exitcode(status)
            outcome = (
                "too slow"
                if code == -signal.SIGALRM
                else f"ended with {signal.Signals(-code).name if code < 0 else code}"
            )
            _write(file, len(results), outcome)
            results[len(results)] = outcome
    os.close(file)
    return results


def _work_through(numbers: range, work: Callable[[int], str], seconds: int, file: int) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A limit, so that a tensor of many gigabytes raises instead of filling the memory.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _ROOM, mapped + _ROOM))
    warnings.simplefilter("ignore")
    for number in numbers:
        signal.alarm(seconds)
        try:
            outcome = work(number)
        except BaseException as error:  # noqa: BLE001
            outcome = f"failed: {error!r}"
        signal.alarm(0)
        _write(file, number, outcome)


def _write(file: int, number: int, outcome: str) -> None:
    os.pwrite(file, outcome.encode("ascii", "replace")[: _LINE - 1].ljust(_LINE), _LINE * number)


def resident(field: str) -> int:
    """Return bytes in memory: now (`VmRSS`), or the maximum since the last reset (`VmHWM`)."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024
