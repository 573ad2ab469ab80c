"""Step metrics: loss, loss scale and skipped steps, copied asynchronously to pinned memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import torch

from mezzo import _events, _launch
from mezzo.scaling import capture
from mezzo.scaling.scaler import GradScaler


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


class MetricIndex(IntEnum):
    """Positions of the metrics in the memory of a `MetricsBuffer`, for the kernel too."""

    LOSS = 0
    SKIPPED = 1
    SCALE = 2
    """First of the scaler's counters, which follow in the order of `capture.device_counters`."""
    SKIPPED_STEPS = 3
    CONSECUTIVE_SKIPS = 4


class MetricsBuffer:
    """Memory that each step writes its metrics to, pinned on CUDA: no call synchronizes."""

    def __init__(self, device: torch.device, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self.memory = torch.zeros(len(MetricIndex), pin_memory=device.type == "cuda")
        """One float32 for each `MetricIndex`."""
        self.memory[MetricIndex.SCALE] = 1.0 if scaler is None else scaler.get_scale()
        self._warned = False

    # The flag itself, on the host or on the device.
    def write(self, loss: torch.Tensor | None, found_nonfinite: torch.Tensor | bool | None) -> None:  # noqa: FBT001
        """Write the metrics of a call.

        `loss` is None if none was computed, `found_nonfinite` is None if nothing was updated.
        """
        if isinstance(found_nonfinite, torch.Tensor) and self._scaler is not None:
            counters = capture.device_counters(self._scaler)
            if counters is not None:
                flag = found_nonfinite.reshape(()).to(counters)
                self._write_from_device(loss, flag, counters)
                return
        if loss is not None:
            place = slice(MetricIndex.LOSS, MetricIndex.LOSS + 1)
            self.memory[place].copy_(loss.detach().reshape(1), non_blocking=True)
        if found_nonfinite is not None and self._scaler is not None:
            numbers = (found_nonfinite, *capture.host_counters(self._scaler))
            self.memory[MetricIndex.SKIPPED :] = torch.tensor([*map(float, numbers)])

    def _write_from_device(
        self, loss: torch.Tensor | None, flag: torch.Tensor, counters: torch.Tensor
    ) -> None:
        device = counters.device
        if _launch.has_triton(device) and (loss is None or loss.dtype in _launch.DTYPES):
            # One launch that writes to pinned memory: concatenating and copying the numbers takes
            # 5 µs of a captured step on an H200.
            # Imported here: Triton is optional and slow to import.
            from mezzo.step.triton_kernels import metrics_kernel  # noqa: PLC0415

            numbers = (self.memory, flag if loss is None else loss.detach(), flag, counters)
            loss_dtype = torch.float32 if loss is None else loss.dtype
            constants = (
                _launch.triton_dtype(loss_dtype),
                loss is not None,
                MetricIndex.LOSS.value,
                MetricIndex.SKIPPED.value,
                MetricIndex.SCALE.value,
                len(MetricIndex),
            )
            with _launch.device_guard(device):
                _launch.run_kernel(metrics_kernel, 1, numbers, constants, device)
            return
        values = [flag.reshape(1), counters[: len(MetricIndex) - MetricIndex.SCALE]]
        start = MetricIndex.SKIPPED
        if loss is not None:
            values.insert(0, loss.detach().reshape(1).to(counters))
            start = MetricIndex.LOSS
        self.memory[start:].copy_(torch.cat(values), non_blocking=True)

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
        )

    def scale_and_skips(self) -> tuple[float, int]:
        """Return the loss scale and the consecutive skips that have arrived."""
        values = self.memory.tolist()
        return values[MetricIndex.SCALE], int(values[MetricIndex.CONSECUTIVE_SKIPS])
