"""`gluoncv.utils`: the learning rate schedules of its training scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mezzo.compat._missing import module_getattr
from mezzo.compat.gluoncv._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet import lr_scheduler

__all__ = ["LRScheduler", "LRSequential"]

_MODES = ("constant", "step", "linear", "poly", "cosine")


class LRScheduler(lr_scheduler.LRScheduler):
    """`gluoncv.utils.LRScheduler`: from `base_lr` to `target_lr` in a number of updates."""

    def __init__(
        self,
        mode: str,
        base_lr: float = 0.1,
        target_lr: float = 0,
        niters: int = 0,
        nepochs: int = 0,
        iters_per_epoch: int = 0,
        offset: int = 0,
        power: float = 2,
        step_iter: Sequence[int] | None = None,
        step_epoch: Sequence[int] | None = None,
        step_factor: float = 0.1,
    ) -> None:
        super().__init__(base_lr)
        if mode not in _MODES:
            # gluoncv's exception type.
            raise AssertionError(f"mode={mode!r} is unknown. Choose one of: {', '.join(_MODES)}.")
        if mode == "step" and step_iter is None and step_epoch is None:
            raise AssertionError("mode='step' needs step_iter= or step_epoch=.")
        self.mode, self.offset, self.power = mode, offset, power
        self.target_lr = base_lr if mode == "constant" else target_lr
        self.niters = nepochs * iters_per_epoch or niters
        epochs = [epoch * iters_per_epoch for epoch in step_epoch or ()]
        self.step, self.step_factor = list(step_iter or epochs), step_factor

    def start_at(self, num_update: int) -> None:
        """Set the update with which this schedule starts."""
        self.offset = num_update

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        last = self.niters - 1
        update = min(max(0, num_update - self.offset), last)
        progress = update / last if last > 0 else 0.0
        if self.mode == "constant":
            return self.base_lr
        if self.mode == "step":
            return float(
                self.base_lr * self.step_factor ** sum(update >= step for step in self.step)
            )
        left = {
            "linear": 1 - progress,
            "poly": (1 - progress) ** self.power,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.mode]
        return float(self.target_lr + (self.base_lr - self.target_lr) * left)


class LRSequential(lr_scheduler.LRScheduler):
    """`gluoncv.utils.LRSequential`: schedules one after the other."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        super().__init__()
        if not schedulers:
            raise AssertionError("LRSequential needs at least one LRScheduler.")
        self.schedulers = list(schedulers)
        start = 0
        for scheduler in self.schedulers:
            scheduler.start_at(start)
            start += scheduler.niters
        self.count = start

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        started = [s for s in self.schedulers if s.offset <= num_update] or self.schedulers[:1]
        return started[-1](num_update)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
