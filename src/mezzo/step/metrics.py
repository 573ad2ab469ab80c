"""Step metrics: loss, loss scale, skips, learning rate and gradient norm, without synchronizing."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from mezzo import _events, _launch
from mezzo._torch import DisableTorchDispatch
from mezzo.scaling import captured_scaler, check_unscale
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.schedule_sync import groups_of
from mezzo.step.step_history import NO_UPDATE, StepHistory


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of the last finished step. On CUDA this can lag a few steps."""

    loss: float
    """Loss of the step; 0 before the first."""
    skipped: bool
    """Whether the last update was skipped."""
    scale: float
    """Loss scale after the step; 1 without a scaler."""
    skipped_steps: int
    """Number of updates skipped so far."""
    rate: float = 0.0
    """Learning rate of the last update, in the first group of the first optimizer; before the first
    one, that of the optimizer."""
    grad_norm: float | None = None
    """Norm of the unscaled gradients of all optimizers in the last update, before clipping.

    None unless the step has `clip_norm=` or `grad_norm=True`; 0 before the first update; infinite
    or NaN if that update was skipped."""


class MetricIndex(IntEnum):
    """Positions of the metrics in the memory of a `MetricsBuffer`, for the kernel too."""

    LOSS = 0
    SKIPPED = 1
    SCALE = 2
    """First of the scaler's counters, in the order of `captured_scaler.device_counters`."""
    SKIPPED_STEPS = 3
    CONSECUTIVE_SKIPS = 4
    RATE = 5
    """First after the counters."""
    GRAD_NORM = 6


Rate = torch.Tensor | float | None
"""A learning rate: a number, the first element of a tensor, or None if there is none."""


class _Tensors(NamedTuple):
    """Metrics to write that are tensors, in the order of the kernel's arguments."""

    loss: torch.Tensor | None
    flag: torch.Tensor | None
    """float32: 1 if the update was skipped; passed together with `counters`."""
    counters: torch.Tensor | None
    rate: torch.Tensor | None
    square_sum: torch.Tensor | None

    def suit_kernel(self, device: torch.device) -> bool:
        """Return whether the kernel can read all of them."""
        given = [value for value in self if value is not None]
        return bool(given) and all(
            value.device == device and value.dtype in _launch.DTYPES for value in given
        )


class MetricsBuffer:
    """Memory that each step writes its metrics to, pinned on CUDA: no call synchronizes.

    `rate` is the learning rate before the first update, `computes_norm` whether there is a norm.
    """

    def __init__(
        self,
        device: torch.device,
        scaler: GradScaler | None,
        *,
        rate: Rate = None,
        computes_norm: bool = False,
    ) -> None:
        self._device, self._scaler, self._computes_norm = device, scaler, computes_norm
        # float64: a learning rate is read as the number that was set.
        self.memory = torch.zeros(
            len(MetricIndex), dtype=torch.float64, pin_memory=device.type == "cuda"
        )
        """One number for each `MetricIndex`."""
        self.reset(rate)
        self._warned = False
        self.history: StepHistory | None = None
        """Where the metrics of every call are written too; set by `record_to`."""
        self.revision = 0
        """Changes with the history, which is part of a captured step."""

    def reset(self, rate: Rate) -> None:
        """Start with the scale and the skips of the scaler, before the next update."""
        counters = (
            (1.0, 0, 0) if self._scaler is None else captured_scaler.host_counters(self._scaler)
        )
        self.memory.zero_()
        self.memory[MetricIndex.SCALE : MetricIndex.RATE] = self.memory.new_tensor(counters)
        self.memory[MetricIndex.RATE] = 0.0 if rate is None else float(rate)

    def record_to(self, history: StepHistory | None) -> None:
        """Also write the metrics of each call to a history; None stops that."""
        self.history = history
        self.revision += 1

    def write(
        self,
        loss: torch.Tensor | None,
        # The flag itself, on the host or on the device.
        found_nonfinite: torch.Tensor | bool | None,  # noqa: FBT001
        *,
        rate: Rate = None,
        square_sum: torch.Tensor | None = None,
    ) -> None:
        """Write the metrics of a call.

        `loss` is None if none was computed, `found_nonfinite` is None if nothing was updated.
        `square_sum` is the sum of squares of the unscaled gradients, float64.
        """
        flag = counters = None
        if found_nonfinite is not None and self._scaler is not None:
            counters = captured_scaler.device_counters(self._scaler)
            if counters is None or not isinstance(found_nonfinite, torch.Tensor):
                numbers = (found_nonfinite, *captured_scaler.host_counters(self._scaler))
                place = slice(MetricIndex.SKIPPED, MetricIndex.RATE)
                with DisableTorchDispatch():
                    self.memory[place] = self.memory.new_tensor([*map(float, numbers)])
                counters = None
                if self.history is not None and _launch.has_triton(self._device):
                    table = _launch.table_on(self._device, torch.tensor([*map(float, numbers), 0]))
                    flag, counters = table[0], table[1:]
            else:
                flag = found_nonfinite.reshape(()).to(counters)
        if isinstance(rate, float | int):
            with DisableTorchDispatch():
                self.memory[MetricIndex.RATE] = rate
            rate = None
        tensors = _Tensors(
            None if loss is None else loss.detach(), flag, counters, rate, square_sum
        )
        updates = found_nonfinite is not None
        if _launch.has_triton(self._device) and tensors.suit_kernel(self._device):
            self._run_kernel(tensors, updates=updates)
        else:
            self._copy(tensors)
            if self.history is not None:
                self._append(self.history, tensors, updates=updates)

    def _run_kernel(self, tensors: _Tensors, *, updates: bool) -> None:
        """Write to pinned memory by one kernel.

        Concatenating and copying the numbers takes 5 µs of a captured step on an H200.
        """
        # Imported here: Triton is optional and slow to import.
        from mezzo.step.triton_metrics import metrics_kernel  # noqa: PLC0415

        # The memory is passed where the kernel does not read.
        numbers = [self.memory if tensor is None else tensor for tensor in tensors]
        history = self.history
        counts = None if history is None else history.counts
        numbers += [
            self.memory if history is None else history.rows,
            self.memory if history is None else history.cursor,
            self.memory if counts is None else counts.memory,
        ]
        if history is not None and _launch.is_capturing(self._device):
            check_unscale.keep_captured((history.rows, history.cursor))
        constants = (
            _launch.triton_dtype(torch.float32 if tensors.loss is None else tensors.loss.dtype),
            _launch.triton_dtype(torch.float32 if tensors.rate is None else tensors.rate.dtype),
            tensors.loss is not None,
            tensors.counters is not None,
            tensors.rate is not None,
            tensors.square_sum is not None,
            MetricIndex.LOSS.value,
            MetricIndex.SKIPPED.value,
            MetricIndex.SCALE.value,
            MetricIndex.RATE.value,
            MetricIndex.GRAD_NORM.value,
            history is not None,
            counts is not None,
            updates,
            1 if history is None else len(history.rows),
        )
        with _launch.device_guard(self._device):
            _launch.run_kernel(metrics_kernel, 1, (self.memory, *numbers), constants, self._device)

    def _copy(self, tensors: _Tensors) -> None:
        """Write by one copy for each metric, which modes that count ops do not see."""
        # Dispatch is how tensors of other types, such as a DTensor, work.
        is_plain = all(value is None or type(value) is torch.Tensor for value in tensors)
        with DisableTorchDispatch() if is_plain else nullcontext():
            self._copy_each(tensors)

    def _copy_each(self, tensors: _Tensors) -> None:
        norm = None if tensors.square_sum is None else tensors.square_sum.sqrt()
        for index, value in (
            (MetricIndex.LOSS, tensors.loss),
            (MetricIndex.SKIPPED, tensors.flag),
            (MetricIndex.SCALE, tensors.counters),
            (MetricIndex.RATE, tensors.rate),
            (MetricIndex.GRAD_NORM, norm),
        ):
            if value is not None:
                count = MetricIndex.RATE - MetricIndex.SCALE if index is MetricIndex.SCALE else 1
                place = slice(index, index + count)
                self.memory[place].copy_(value.reshape(-1)[:count], non_blocking=True)

    def _append(self, history: StepHistory, tensors: _Tensors, *, updates: bool) -> None:
        """Write a row of the history where there is no kernel: all values are on the host."""
        values = self.memory.tolist()
        history.append(
            tensors.loss,
            values[MetricIndex.SKIPPED] if updates else NO_UPDATE,
            values[MetricIndex.SCALE],
            None if tensors.square_sum is None else tensors.square_sum.sqrt(),
        )

    def warn_if_nonfinite(self) -> None:
        """Warn once that a loss is NaN or infinite, as soon as that has arrived."""
        if self._warned or isfinite(loss := self.memory.tolist()[MetricIndex.LOSS]):
            return
        self._warned = True
        if _events.listening():
            _events.emit(_events.LossNotFinite(loss, skipped=self._scaler is not None))
        if self._scaler is None:
            warnings.warn(
                f"The loss is {loss} and no GradScaler is used, so this step's update was applied."
                " Pass scaler=mezzo.GradScaler() to skip such steps. Look for a division or"
                " logarithm near zero, or a learning rate that is too high.",
                UserWarning,
                stacklevel=4,
            )

    def read(self) -> StepMetrics:
        """Return the metrics that have arrived. Does not synchronize."""
        values = self.memory.tolist()
        return StepMetrics(
            values[MetricIndex.LOSS],
            bool(values[MetricIndex.SKIPPED]),
            values[MetricIndex.SCALE],
            int(values[MetricIndex.SKIPPED_STEPS]),
            values[MetricIndex.RATE],
            values[MetricIndex.GRAD_NORM] if self._computes_norm else None,
        )

    def scale_and_skips(self) -> tuple[float, int]:
        """Return the loss scale and the consecutive skips that have arrived."""
        values = self.memory.tolist()
        return values[MetricIndex.SCALE], int(values[MetricIndex.CONSECUTIVE_SKIPS])


def first_rate(optimizer: Optimizer) -> Rate:
    """Return the learning rate of the first group, as it is on the host. Never synchronizes."""
    rate: Rate = groups_of(optimizer)[0].get("lr")
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu":
        # A number: a scheduler may write the next rate to the tensor.
        return float(rate)
    return rate
