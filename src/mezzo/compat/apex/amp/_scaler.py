"""The scale of one loss, as Apex's `LossScaler` shows it."""

from __future__ import annotations

from dataclasses import replace

import torch

from mezzo.scaling.binding import binding_of
from mezzo.scaling.culprit import NOBODY
from mezzo.scaling.gradients import Flags, check_sorted
from mezzo.scaling.scales import Scales, first_states
from mezzo.scaling.state import LARGEST, ScaleRule
from mezzo.scaling.watch import Watcher
from mezzo.scaling.words import OnCollapse

_PATIENCE = 50
_FLOOR = ScaleRule().min_scale


class LossScaler:
    """A loss scale, dynamic or not. A static one skips bad steps as well, which Apex's writes into the weights; and a scale never falls to 0.

    >>> LossScaler("dynamic").loss_scale(), LossScaler(128.0).loss_scale()
    (65536.0, 128.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if self.dynamic:
            rule = ScaleRule(scale_factor, 1.0 / scale_factor, scale_window, min_scale=min_loss_scale or _FLOOR, max_scale=min(max_loss_scale, LARGEST))
        else:
            rule = ScaleRule(dynamic=False)
        start = init_scale if self.dynamic else float(loss_scale)
        self._scales = Scales(rule, first_states(rule, start, 1), [Watcher(_PATIENCE, OnCollapse.WARN)])
        self._set = start
        """The scale that was set last: a static one stays there, and is known without asking the device."""

    def loss_scale(self) -> float:
        """The scale; this waits for the device."""
        return self._loss_scale

    @property
    def is_idle(self) -> bool:
        """Whether it multiplies by one, and always will."""
        return not self.dynamic and self._set == 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss in float32, so many times as large."""
        scale = self._scales.make(loss.device, 0).scale
        return loss.float() * scale.to(loss.device, non_blocking=loss.device.type != "cpu")

    def scale_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply gradients that are there by the scale, for scaled ones are going to be added to them."""
        scale = self._scales.of(0).scale
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.to(parameter.grad.device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Divide an optimizer's gradients by the scale, 16-bit ones as float32; the flags that say whether they are finite, which nobody has read."""
        bound, flags = binding_of(optimizer), Flags()
        if bound is not None:
            bound.widen_gradients()
        check_sorted(optimizer, self._scales.of(0).inverse(), flags)
        return list(flags.values())

    def update_scale(self, flags: list[torch.Tensor]) -> bool:
        """Adapt the scale to the flags of one backward pass, and say whether a gradient was not finite; this waits for the device."""
        if not flags:
            return False
        self._scales.make(flags[0].device, 0)
        self._scales.advance(0, flags, NOBODY)
        return any(bool(flag) for flag in flags)

    @property
    def _loss_scale(self) -> float:
        return self._scales.state(0).scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._set = self._scales.rule.clamp(float(scale))
        self._scales.load([replace(self._scales.state(0), scale=self._set)], self._scales.rule)

    @property
    def _unskipped(self) -> int:
        return self._scales.state(0).good_in_a_row

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        self._scales.load([replace(self._scales.state(0), good_in_a_row=int(count))], self._scales.rule)
