"""`mxnet.lr_scheduler`: learning rates by the number of updates, for `gluon.Trainer`.

The formulas are those of MXNet 1.9.1 (python/mxnet/lr_scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
]


class LRScheduler:
    """`mxnet.lr_scheduler.LRScheduler`: base class; define `__call__(self, num_update)`."""

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        if warmup_begin_lr > base_lr:
            raise ValueError("Base lr has to be higher than warmup_begin_lr")
        if warmup_steps < 0:
            raise ValueError("Warmup steps has to be positive or 0")
        if warmup_mode not in ("linear", "constant"):
            raise ValueError("Supports only linear and constant modes of warmup")
        self.base_lr = self.warmup_final_lr = base_lr
        self.warmup_steps, self.warmup_begin_lr = warmup_steps, warmup_begin_lr
        self.warmup_mode = warmup_mode

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the learning rate of an update of the warm-up."""
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        increase = self.warmup_final_lr - self.warmup_begin_lr
        return self.warmup_begin_lr + increase * num_update / self.warmup_steps

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of an update; the first is 1."""
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self._rate_after_warmup(num_update)

    def _rate_after_warmup(self, num_update: int) -> float:
        raise NotImplementedError("__call__ method must be overridden.")


class FactorScheduler(LRScheduler):
    """`mxnet.lr_scheduler.FactorScheduler`: multiply by a factor every n updates.

    >>> scheduler = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    >>> [scheduler(n) for n in range(1, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if step < 1:
            raise ValueError("Schedule step must be greater or equal than 1 round")
        _check_factor(factor)
        self.step, self.factor, self.stop_factor_lr, self.count = step, factor, stop_factor_lr, 0

    def _rate_after_warmup(self, num_update: int) -> float:
        while num_update > self.count + self.step:
            self.count += self.step
            self.base_lr = max(self.base_lr * self.factor, self.stop_factor_lr)
        return self.base_lr


class MultiFactorScheduler(LRScheduler):
    """`mxnet.lr_scheduler.MultiFactorScheduler`: multiply by a factor after given updates."""

    def __init__(
        self,
        step: Sequence[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if list(step) != sorted(set(step)):
            raise ValueError("Schedule step must be an increasing integer list")
        if not step or step[0] < 1:
            raise ValueError("Schedule step must be greater or equal than 1 round")
        _check_factor(factor)
        self.step, self.factor, self.cur_step_ind = list(step), factor, 0

    def _rate_after_warmup(self, num_update: int) -> float:
        while self.cur_step_ind < len(self.step) and num_update > self.step[self.cur_step_ind]:
            self.cur_step_ind += 1
            self.base_lr *= self.factor
        return self.base_lr


class _DecayScheduler(LRScheduler):
    """Base of the schedules from `base_lr` to `final_lr` in `max_update` updates."""

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if max_update < 1:
            raise ValueError("maximum number of updates must be strictly positive")
        self.base_lr_orig, self.max_update, self.final_lr = base_lr, max_update, final_lr
        self.max_steps = max_update - warmup_steps

    def _rate_after_warmup(self, num_update: int) -> float:
        if num_update <= self.max_update:
            left = self._share_left((num_update - self.warmup_steps) / self.max_steps)
            self.base_lr = self.final_lr + (self.base_lr_orig - self.final_lr) * left
        return self.base_lr

    def _share_left(self, progress: float) -> float:
        raise NotImplementedError


class PolyScheduler(_DecayScheduler):
    """`mxnet.lr_scheduler.PolyScheduler`: along a polynomial from `base_lr` to `final_lr`."""

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.power = pwr

    def _share_left(self, progress: float) -> float:
        return float((1 - progress) ** self.power)


class CosineScheduler(_DecayScheduler):
    """`mxnet.lr_scheduler.CosineScheduler`: along a cosine from `base_lr` to `final_lr`."""

    def _share_left(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


def _check_factor(factor: float) -> None:
    if factor > 1.0:
        raise ValueError("Factor must be no more than 1 to make lr reduce")


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
