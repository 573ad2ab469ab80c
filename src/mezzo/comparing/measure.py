"""Measure modes: losses, accuracy, memory and casts of one after the other, times interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._casting import tensors_of
from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo.advising.setting_run import Peak, state_bytes
from mezzo.advising.timing import time_once, unsteady
from mezzo.comparing.comparison import ModeResult
from mezzo.comparing.modes import Mode, Setting, Training, float32_products, make_training
from mezzo.comparing.workload import Batch
from mezzo.conversion.convert import convert
from mezzo.conversion.converted import Converted
from mezzo.observing.count_dtypes import count_dtypes

Advance = Callable[[], None]
"""Called after each step or call, for a progress bar."""

_POINTS = 10
"""Points of a loss curve without epochs."""
_BATCHES = 4
"""Different batches of timed steps."""
_KEPT_BYTES = 2**30
"""Bytes of batches that are kept for all modes; others are made again for each."""
_WARM_UP, _CALLS_TO_CAPTURE = 2, 15
"""Steps before the timed ones, and at most, until a step is captured."""
_ROUND_SECONDS, _MAX_CALLS = 0.05, 20
"""Calls of a mode in a round fill about this time, at most so many."""


class Batches:
    """Batches of a workload, kept on the host for the next mode as far as they fit."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._kept: dict[int, Batch] = {}
        self._bytes = 0

    def __getitem__(self, number: int) -> Batch:
        """Return the batch of a step on the device."""
        batch = self._kept.get(number)
        if batch is None:
            batch = self._setting.make_batch(number)
            self._bytes += sum(tensor.nbytes for tensor in tensors_of(batch))
            if self._bytes <= _KEPT_BYTES:
                self._kept[number] = batch
        return self._setting.move(batch)


# -- losses, accuracy, memory and casts ------------------------------------------------------------


def train(
    mode: Mode, setting: Setting, batches: Batches, steps: int, advance: Advance
) -> tuple[ModeResult, Training]:
    """Train a model in a mode, and return what was measured but for its time."""
    peak = Peak(setting.device)
    training = make_training(mode, setting)
    workload, losses, accuracies = setting.workload, list[Tensor](), list[float]()
    for number in range(steps):
        losses.append(training(batches[number]))
        if not number:
            # The first step searches for a loss scale, and keeps two sets of gradients if it can.
            peak.restart()
        if workload.evaluate and workload.epoch_steps and not (number + 1) % workload.epoch_steps:
            accuracies.append(training.evaluate(workload.evaluate))
        advance()
    accuracy = accuracies[-1] if accuracies else None
    if workload.evaluate and (not accuracies or steps % (workload.epoch_steps or 1)):
        accuracy = training.evaluate(workload.evaluate)
    values = torch.stack([loss.float() for loss in losses]).tolist()
    result = ModeResult(
        mode.value,
        training.dtype,
        peak_bytes=peak.read(lambda: _state_bytes(training)),
        loss=fmean(values[-max(1, steps // _POINTS) :]),
        skipped=training.skipped(),
        accuracy=accuracy,
        loss_curve=curve(values, workload.epoch_steps),
        accuracy_curve=tuple(accuracies),
        note=_capture_note(training),
    )
    casts, saved = count_step(training, batches[0])
    return replace(result, casts=casts, saved_bytes=saved), training


def _state_bytes(training: Training) -> int:
    """Return the bytes of parameters, gradients and optimizer states.

    Modes differ in whether gradients are there between steps: they count in all.
    """
    training.optimizer.zero_grad(set_to_none=True)
    trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    return state_bytes(training.model, [training.optimizer]) + sum(
        parameter.nbytes for parameter in trained
    )


def curve(losses: Sequence[float], epoch_steps: int | None) -> tuple[float, ...]:
    """Return the mean loss of each epoch, or of each tenth of the steps.

    >>> curve([3.0, 2.0, 1.0], None), curve([3.0, 2.0, 1.0], 2)
    ((3.0, 2.0, 1.0), (2.5, 1.0))
    """
    count = len(losses)
    if epoch_steps is None:
        points = min(_POINTS, count)
        ends = [count * point // points for point in range(points + 1)]
    else:
        ends = [*range(0, count, epoch_steps), count]
    return tuple(fmean(losses[a:b]) for a, b in pairwise(ends))


def _capture_note(training: Training) -> str | None:
    step = training.captured
    if step is None or step.captured:
        return None
    return f"not captured: {step.eager_reason or 'too few steps to capture'}"


def count_step(training: Training, batch: Batch) -> tuple[int, int]:
    """Run one more step; return its casts, and the bytes that it keeps for backward.

    Parameters and buffers do not count, which are there anyway.
    """
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # In the block a captured step runs eagerly; a replay would show nothing.
    with (
        count_dtypes() as counts,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        training(batch)
    for tensor in (*training.model.parameters(), *training.model.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(counts.of("_to_copy").values()), sum(saved.values())


# -- forward passes of the converted model ---------------------------------------------------------


@dataclass(frozen=True)
class Inference:
    """The model that was trained in float32, and what `mezzo.convert` made of it."""

    model: nn.Module
    converted: Converted
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run_float32(self) -> None:
        """Run a forward pass of the model."""
        with float32_products(tf32=False), torch.no_grad():
            self.model(*self.args, **self.kwargs)

    def run_converted(self) -> None:
        """Run a forward pass of the converted model."""
        with float32_products(tf32=False):
            self.converted(*self.args, **self.kwargs)


def convert_trained(
    setting: Setting, batch: Batch, weights: dict[str, Any]
) -> tuple[ModeResult, Inference]:
    """Convert a model with trained weights, and compare its outputs with float32."""
    model = setting.make_model().eval()
    model.load_state_dict(weights)
    args, kwargs = _inputs_of(setting, model, batch)
    with float32_products(tf32=False):
        converted = convert(model, args, kwargs, dtype=setting.dtype)
        error = converted.compare(*args, against=model, **kwargs).worst
        # The conversion needs more memory than the program that it makes.
        peak = Peak(setting.device)
        converted(*args, **kwargs)
    stored = sum(tensor.nbytes for tensor in converted.module.state_dict().values())
    result = ModeResult(
        Mode.CONVERTED.value,
        dtype_name(setting.dtype),
        peak_bytes=stored + peak.read(lambda: 0),
        casts=converted.casts.after.count,
        note=f"a forward pass; relative error of its outputs {error:.1e}",
    )
    return result, Inference(model, converted, args, kwargs)


def _inputs_of(
    setting: Setting, model: nn.Module, batch: Batch
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the loss of a workload calls the model."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            setting.workload.loss(model, batch)
    finally:
        hook.remove()
    if not calls:
        raise UnsupportedError("The loss of the workload does not call the model itself.")
    return calls[0]


# -- times -----------------------------------------------------------------------------------------


@dataclass
class Timed:
    """A function that is timed in turn with others."""

    name: str
    run: Callable[[], object]
    calls: int = 1
    """Calls in each round."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a call, in each round so far."""
    error: Exception | None = None
    """What it raised; it is not timed any more."""

    @property
    def milliseconds(self) -> float | None:
        """The median over the rounds so far; None if there is none."""
        return 1000 * median(self.seconds) if self.seconds else None

    @property
    def unsteady(self) -> str | None:
        """What a note says if the rounds differ a lot."""
        found = unsteady(self.seconds)
        if found is None:
            return None
        low, high = found
        return f"unsteady: rounds took from {1000 * low:.3g} to {1000 * high:.3g} ms"

    def time(self, device: torch.device) -> None:
        """Time one round."""
        if self.error is None:
            try:
                self.seconds.append(time_once(self._run, device) / self.calls)
            except Exception as error:  # noqa: BLE001 - the other modes can still be timed
                self.error = error

    def _run(self) -> None:
        for _ in range(self.calls):
            self.run()


def timed_training(training: Training, name: str, batches: Batches, device: torch.device) -> Timed:
    """Return steps to time, after a few that are not, which also capture."""
    cycle = _Cycle(training, [batches[number] for number in range(_BATCHES)])
    for call in range(_CALLS_TO_CAPTURE):
        if call >= _WARM_UP and (training.captured is None or training.captured.captured):
            break
        cycle()
    return timed(name, cycle, device)


def timed(name: str, run: Callable[[], object], device: torch.device) -> Timed:
    """Return a function to time, with as many calls in a round as fill a short time."""
    once = time_once(run, device)
    return Timed(name, run, min(max(round(_ROUND_SECONDS / max(once, 1e-9)), 1), _MAX_CALLS))


class _Cycle:
    """Trains on a few batches in turn."""

    def __init__(self, training: Training, batches: list[Batch]) -> None:
        self._training, self._batches, self._calls = training, batches, 0

    def __call__(self) -> None:
        self._training(self._batches[self._calls % len(self._batches)])
        self._calls += 1


def time_rounds(runs: Sequence[Timed], device: torch.device, rounds: int, advance: Advance) -> None:
    """Time functions in turn: each round runs all, so that a change of the clock meets all alike.

    What was measured is in `runs`, also if this is interrupted.
    """
    for _ in range(rounds):
        for run in runs:
            run.time(device)
            advance()
