"""Time matrix products in each dtype in processes of their own, which a CPU may kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SECONDS = 60
"""A measurement that takes longer is given up."""

_PROGRAM = """
import json, sys, time, torch
device, size, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
synchronize = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
for name in names:
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    matrix = torch.randn(size, size, device=device).to(dtype)
    times = []
    for _ in range(6):
        synchronize()
        start = time.perf_counter()
        matrix @ matrix
        synchronize()
        times.append(time.perf_counter() - start)
    print(json.dumps([name, sorted(times[1:])[2]]), flush=True)
"""
_SIZES = {"cpu": 512}
_SIZE = 4096
"""Rows and columns of the matrices on a CPU, and elsewhere."""


@dataclass(frozen=True)
class ProductTime:
    """The time of a product in one dtype, or how the process ended that computed it."""

    dtype: str
    """`float32`, `tf32`, `float16` or `bfloat16`."""
    seconds: float | None
    """The median of five; None if the process failed."""
    failure: str | None = None
    """`SIGILL`, `time limit`, or the last line that the process printed to stderr."""


def time_products(
    device: str,
    dtypes: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    program: str = _PROGRAM,
) -> tuple[ProductTime, ...]:
    """Time products on a device. A dtype that kills the process leaves the others measured."""
    found: dict[str, ProductTime] = {}
    while remaining := [name for name in dtypes if name not in found]:
        arguments = [device, str(_SIZES.get(device, _SIZE)), *remaining]
        output, failure = _run([sys.executable, "-c", program, *arguments], environment or {})
        for name, seconds in map(json.loads, output.splitlines()):
            found[name] = ProductTime(name, seconds)
        failed = next((name for name in remaining if name not in found), None)
        if failed is not None:
            found[failed] = ProductTime(failed, None, failure)
    return tuple(found[name] for name in dtypes)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Return what a process printed, and how it failed if it did."""
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter, with the program above
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=os.environ | dict(environment),
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode()
        return text, f"time limit of {_SECONDS} s"
    if ended.returncode < 0:
        return ended.stdout, signal.Signals(-ended.returncode).name
    lines = ended.stderr.strip().splitlines()
    return ended.stdout, lines[-1] if lines else f"exit code {ended.returncode}"
