"""`oneflow.optim.lr_scheduler`: `WarmUpLR` and `CosineDecayLR`; other names are torch's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from mezzo._torch import closed_form_rates, has_closed_form
from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS

__all__ = ["CosineDecayLR", "WarmUpLR", "WarmupLR"]


class CosineDecayLR(LambdaLR):
    """`oneflow.optim.lr_scheduler.CosineDecayLR`: from the rate to `alpha` times it, and stay.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> CosineDecayLR(optimizer, decay_steps=2, alpha=0.5).lr_lambdas[0](1)
    0.75
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        decay_steps: int,
        alpha: float = 0.0,
        last_step: int = -1,
    ) -> None:
        if decay_steps <= 0:
            # OneFlow's exception type.
            raise AssertionError(f"decay_steps must greater than zero, but got {decay_steps}")

        def factor(step: int) -> float:
            share = (1 + math.cos(math.pi * min(step, decay_steps) / decay_steps)) / 2
            return (1 - alpha) * share + alpha

        super().__init__(optimizer, factor, last_step)


class WarmUpLR(LRScheduler):
    """`oneflow.optim.lr_scheduler.WarmUpLR`: a warm-up, then the rate or another scheduler.

    The scheduler counts the steps of the warm-up too, unless `warmup_prefix=True`.
    """

    def __init__(
        self,
        scheduler_or_optimizer: LRScheduler | torch.optim.Optimizer,
        warmup_factor: float = 1.0 / 3,
        warmup_iters: int = 5,
        warmup_method: str = "linear",
        warmup_prefix: bool = False,
        last_step: int = -1,
    ) -> None:
        if not isinstance(scheduler_or_optimizer, LRScheduler | torch.optim.Optimizer):
            raise ValueError(
                "'scheduler_or_optimizer' must be a LRScheduler or an Optimizer, but got"
                f" {type(scheduler_or_optimizer)}"
            )
        if warmup_method not in ("linear", "constant"):
            raise ValueError(
                f"'warmup_method' must be 'linear' or 'constant', but got {warmup_method}"
            )
        if not (
            isinstance(scheduler_or_optimizer, torch.optim.Optimizer | LambdaLR)
            or has_closed_form(scheduler_or_optimizer)
        ):
            raise TypeError(
                f"WarmUpLR cannot wrap {type(scheduler_or_optimizer).__name__}, whose rates depend"
                " on those before. Use torch.optim.lr_scheduler.SequentialLR with a LinearLR."
            )
        is_scheduler = isinstance(scheduler_or_optimizer, LRScheduler)
        self._inner: Any = scheduler_or_optimizer if is_scheduler else None
        self.warmup_factor, self.warmup_iters = warmup_factor, warmup_iters
        self.warmup_method, self.warmup_prefix = warmup_method, warmup_prefix
        owner: Any = scheduler_or_optimizer
        super().__init__(owner.optimizer if is_scheduler else owner, last_step)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates of the current step."""
        step = self.last_epoch
        if step >= self.warmup_iters:
            return self._rates_after(step - self.warmup_iters if self.warmup_prefix else step)
        starts = [rate * self.warmup_factor for rate in self.base_lrs]
        if self.warmup_method == "constant":
            return starts
        ends = self.base_lrs if self.warmup_prefix else self._rates_after(self.warmup_iters)
        share = step / self.warmup_iters
        return [low + (high - low) * share for low, high in zip(starts, ends, strict=True)]

    def _rates_after(self, step: int) -> list[Any]:
        """Return the learning rates of the scheduler at a step."""
        if self._inner is None:
            return list(self.base_lrs)
        if isinstance(self._inner, LambdaLR):
            factors = [function(step) for function in self._inner.lr_lambdas]
            return [rate * factor for rate, factor in zip(self.base_lrs, factors, strict=True)]
        self._inner.last_epoch = step
        return closed_form_rates(self._inner)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the scheduler inside follows the step."""
        state = super().state_dict()
        state.pop("_inner", None)
        return state


WarmupLR = WarmUpLR


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, fallback=torch.optim.lr_scheduler)
