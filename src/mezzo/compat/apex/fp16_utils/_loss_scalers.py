"""The two scalers of Apex's `fp16_utils`, for training loops written by hand: the loop asks for overflows and says what it found."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mezzo.scaling.state import ScaleRule, ScaleState


class LossScaler:
    """A scale that stays.

    >>> LossScaler(128).loss_scale
    128
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale: float = scale

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:  # noqa: ARG002 - Apex's call shape
        """Whether gradients are not finite: nobody looks."""
        return False

    def update_scale(self, overflow: bool) -> None:  # noqa: FBT001 - Apex's call shape
        """Adapt the scale to what was found: it stays."""

    def scale_gradient(self, module: object, grad_in: tuple[torch.Tensor, ...], grad_out: object) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        """Gradients times the scale; made for `register_full_backward_hook`."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:  # noqa: FBT001, FBT002 - Apex's call shape
        """Run backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that halves on overflow, to no less than 1, and doubles after so many iterations without one.

    >>> scaler = DynamicLossScaler(init_scale=8.0)
    >>> scaler.update_scale(True)
    >>> scaler.loss_scale
    4.0
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self._good = 0

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient is not finite; this waits for the device."""
        gradients = (parameter.grad for parameter in params if parameter.grad is not None)
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)

    def update_scale(self, overflow: bool) -> None:  # noqa: FBT001 - Apex's call shape
        """Adapt the scale to what was found."""
        rule = ScaleRule(self.scale_factor, 1.0 / self.scale_factor, self.scale_window, min_scale=1.0)
        after = rule.after(ScaleState(self.cur_scale, self._good), found_nonfinite=bool(overflow))
        self.cur_scale, self._good = after.scale, after.good_in_a_row
