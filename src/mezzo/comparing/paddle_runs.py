"""Run and time the eight programs of PaddlePaddle's guide to AMP through the dialect.

The guide reports the mean time of a step on a V100, and the loss of the last batch; times here are
medians.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import mezzo
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._hardware import hardware
from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.paddle_programs import (
    EPOCHS,
    Sizes,
    Step,
    run_static_float32,
    run_static_guard,
    run_static_o1,
    run_static_o2,
    train_float32,
    train_o1,
    train_o2,
    train_with_accumulation,
)
from mezzo.comparing.workload import Documented, Preset
from mezzo.compat import paddle

NAME = "paddle-programs"
"""Name on the command line."""


@dataclass(frozen=True)
class Program:
    """A program, and what the guide reports of it."""

    mode: str
    run: Callable[[Sizes, Any], list[Step]]
    seconds: float
    loss: float
    speedup: float | None = None
    """Over the float32 program of the same kind of graph; None for that program itself."""
    is_static: bool = False


PROGRAMS = (
    Program("dynamic float32", train_float32, 0.529, 0.6486028),
    Program("dynamic O1", train_o1, 0.118, 0.6486219, 4.5),
    Program("dynamic O2", train_o2, 0.102, 0.6743, 5.2),
    Program("dynamic accumulation", train_with_accumulation, 0.113, 0.6602017, 4.7),
    Program("static float32", run_static_float32, 0.531, 0.6486028, is_static=True),
    Program("static O1", run_static_o1, 0.117, 0.6486222, 4.5, is_static=True),
    Program("static O2", run_static_o2, 0.098, 0.6743, 5.4, is_static=True),
    Program("static guard", run_static_guard, 0.140, 0.6691731, 3.8, is_static=True),
)
"""The programs in the guide's order."""


def run_programs(
    preset: Preset,
    device: torch.device | str,
    steps: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run the eight programs with the same weights and batches, and return what was measured.

    `steps` counts the batches of both epochs: 20 as in the guide if not given. `progress` is
    called with the mode of each program before it runs. Ctrl-C ends the run and keeps what was
    measured. Needs NumPy.

    >>> result = run_programs(Preset.SMALL, "cpu", steps=2)
    >>> [round(mode.loss, 1) for mode in result.modes]
    [0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]
    """
    device, sizes = torch.device(device), _sizes(preset, steps)
    modes: list[ModeResult] = []
    complete = True
    with _restored_process(device):
        place = paddle.set_device(str(device))
        try:
            for program in PROGRAMS:
                if progress is not None:
                    progress(program.mode)
                modes.append(_measure(program, sizes, place, device))
        except KeyboardInterrupt:
            if not modes:
                raise
            complete = False
    return Comparison(
        workload=NAME,
        title=f"PaddlePaddle's programs, 9 × Linear({sizes.input_size}), batch"
        f" {sizes.batch_size}, SGD",
        preset=preset.value,
        data="synthetic",
        machine=hardware(device).name,
        torch=torch.__version__,
        mezzo=mezzo.__version__,
        steps=EPOCHS * sizes.nums_batch,
        rounds=1,
        modes=tuple(modes),
        documented=tuple(
            Documented(program.mode, program.speedup, "PaddlePaddle, V100")
            for program in PROGRAMS
            if program.speedup is not None
        ),
        complete=complete,
        baseline=PROGRAMS[0].mode,
    )


def _sizes(preset: Preset, steps: int | None) -> Sizes:
    sizes = Sizes() if preset is Preset.FULL else Sizes(128, 128, 16)
    if steps is None:
        return sizes
    if steps < EPOCHS or steps % EPOCHS:
        raise PolicyError(
            f"steps={steps}: PaddlePaddle's programs train for {EPOCHS} epochs of equal length."
            f" Pass a multiple of {EPOCHS}."
        )
    return replace(sizes, nums_batch=steps // EPOCHS)


def _measure(program: Program, sizes: Sizes, place: Any, device: torch.device) -> ModeResult:
    _seed()
    is_cuda = device.type == "cuda"
    if is_cuda:
        # Models of earlier programs are in reference cycles, and would count as this one's memory.
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    with _static_mode() if program.is_static else nullcontext():
        steps = program.run(sizes, place)
    milliseconds = 1e3 * statistics.median(step.seconds for step in steps)
    return ModeResult(
        program.mode,
        dtype=None if program.mode.endswith("float32") else "float16",
        milliseconds=milliseconds,
        samples_per_second=1e3 * sizes.batch_size / milliseconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if is_cuda else None,
        loss=steps[-1].loss,
        loss_curve=tuple(
            statistics.fmean(step.loss for step in steps[first : first + sizes.nums_batch])
            for first in range(0, len(steps), sizes.nums_batch)
        ),
        note=f"PaddlePaddle at 8192 × 2048 on a V100: {1e3 * program.seconds:g} ms, loss"
        f" {program.loss}",
    )


def _seed() -> None:
    import numpy as np  # noqa: PLC0415 - mezzo works without NumPy

    paddle.seed(100)
    np.random.seed(100)  # noqa: NPY002 - as in the guide


@contextmanager
def _static_mode() -> Iterator[None]:
    """Record into new programs, since each block of the guide is a program of its own."""
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            yield
    finally:
        paddle.disable_static()


@contextmanager
def _restored_process(device: torch.device) -> Iterator[None]:
    """Restore the default place and the random states of torch and NumPy afterwards."""
    try:
        import numpy as np  # noqa: PLC0415 - mezzo works without NumPy
    except ImportError as error:
        raise UnsupportedError(
            "numpy is not installed, which PaddlePaddle's programs need. Run: pip install numpy"
        ) from error
    place, state = paddle.get_device(), np.random.get_state()  # noqa: NPY002 - as in the guide
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            # That a CPU emulates 16 bits shows in the times.
            warnings.filterwarnings("ignore", "AMP is slow on")
            yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
        paddle.set_device(place)
