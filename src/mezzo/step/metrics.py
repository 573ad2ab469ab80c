"""What a step tells: loss, scale and skips, from copies that the device makes on its own time into memory that the host may read at any moment."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import isfinite

import torch

from mezzo import _events, _launch
from mezzo.scaling import capture
from mezzo.scaling.scaler import GradScaler

_SKIPPED = 1


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What is known of the last step that a device has finished: on a CPU that is the last one."""

    loss: float
    """Its loss; 0 before the first."""
    skipped: bool
    """Whether the last update was skipped."""
    scale: float
    """The loss scale after it; 1 without a scaler."""
    skipped_steps: int
    """Updates that were skipped so far."""


class MetricsBuffer:
    """Where a step's numbers are written to. Pinned memory: a captured step copies to it, and nobody waits."""

    def __init__(self, device: torch.device, scaler: GradScaler | None) -> None:
        self._on_device, self._scaler = device.type == "cuda", scaler
        self.memory = torch.tensor(
            [0.0, 0.0, 1.0 if scaler is None else scaler.get_scale(), 0.0, 0.0],
            pin_memory=self._on_device,
        )
        """Loss, whether it was skipped, scale, skipped updates, and skipped ones in a row."""
        self._warned = False

    def read(self) -> StepMetrics:
        """The numbers as they have arrived."""
        loss, skipped, scale, skips, _ = self.memory.tolist()
        return StepMetrics(loss, bool(skipped), scale, int(skips))

    def scale_and_skips(self) -> tuple[float, int]:
        """The scale, and the skips in a row, as they have arrived."""
        _, _, scale, _, in_a_row = self.memory.tolist()
        return scale, int(in_a_row)

    # The flag itself, known to the host or not.
    def write(self, loss: torch.Tensor | None, bad: torch.Tensor | bool | None) -> None:  # noqa: FBT001
        """Let the numbers of a step arrive. `bad` is None where nothing was updated."""
        if loss is not None and (bad is None or not self._on_device):
            self.memory[:1].copy_(loss.detach().reshape(1), non_blocking=True)
        if bad is None:
            return
        shown = None if self._scaler is None else capture.device_counters(self._scaler)
        if shown is not None and isinstance(bad, torch.Tensor):
            self._write_on_device(loss, bad.reshape(()).to(shown), shown)
        else:
            self._write_on_host(loss, bad=bool(bad))

    def _write_on_device(
        self, loss: torch.Tensor | None, bad: torch.Tensor, shown: torch.Tensor
    ) -> None:
        if _launch.has_triton(shown.device) and (loss is None or loss.dtype in _launch.DTYPES):
            # One launch that writes to the host's memory: putting the numbers together and copying
            # them takes 5 µs of a captured step on an H200. Triton is optional, and takes a while
            # to import.
            from mezzo.step.triton_kernels import metrics_kernel  # noqa: PLC0415

            numbers = (self.memory, bad if loss is None else loss.detach(), bad, shown)
            constants = (
                _launch.triton_dtype(torch.float32 if loss is None else loss.dtype),
                loss is not None,
            )
            with _launch.device_guard(shown.device):
                _launch.run_kernel(metrics_kernel, 1, numbers, constants, shown.device)
            return
        first = [] if loss is None else [loss.detach().reshape(1).to(shown)]
        self.memory[_SKIPPED - len(first) :].copy_(
            torch.cat([*first, bad.reshape(1), shown[:3]]), non_blocking=True
        )

    def _write_on_host(self, loss: torch.Tensor | None, *, bad: bool) -> None:
        if loss is not None and self._on_device:
            self.memory[:1].copy_(loss.detach().reshape(1), non_blocking=True)
        if self._scaler is not None:
            state = capture.scale_state_of(self._scaler)
            self.memory[_SKIPPED:] = torch.tensor(
                [
                    float(bad),
                    state.scale,
                    float(state.skipped_steps),
                    float(state.consecutive_skips),
                ]
            )

    def warn_if_nonfinite(self) -> None:
        """Say once that a loss is not finite, as soon as that is known."""
        if self._warned or isfinite(loss := self.memory.tolist()[0]):
            return
        self._warned = True
        if _events.listening():
            _events.emit(_events.LossNotFinite(loss, skipped=self._scaler is not None))
        if self._scaler is None:
            warnings.warn(
                f"The loss is {loss}, and nothing skips such steps: the parameters take it over."
                " Look for a division or logarithm near zero, or a learning rate that is too high;"
                " scaler=mezzo.GradScaler() skips steps whose gradients are not finite.",
                UserWarning,
                stacklevel=4,
            )
