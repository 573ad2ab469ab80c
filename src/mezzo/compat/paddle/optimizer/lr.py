"""`paddle.optimizer.lr`: schedules of the learning rate, passed as `learning_rate=`.

The formulas are those of PaddlePaddle 3.3.1 (python/paddle/optimizer/lr.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.optimizer._cosine_schedules import (
    CosineAnnealingDecay,
    CosineAnnealingWarmRestarts,
    OneCycleLR,
)
from mezzo.compat.paddle.optimizer._lr_scheduler import LRScheduler

__all__ = [
    "CosineAnnealingDecay",
    "CosineAnnealingWarmRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LambdaDecay",
    "LinearLR",
    "LinearWarmup",
    "MultiStepDecay",
    "MultiplicativeDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "OneCycleLR",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceOnPlateau",
    "StepDecay",
]


class NoamDecay(LRScheduler):
    """Linear warm-up, then the inverse square root of the step."""

    def __init__(
        self,
        d_model: float,
        warmup_steps: int,
        learning_rate: float = 1.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if d_model <= 0:
            raise ValueError("d_model should be grater than 0")
        self.d_model, self.warmup_steps = d_model, warmup_steps
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        decay = 1.0 if self.last_epoch == 0 else self.last_epoch**-0.5
        warmup = self.warmup_steps**-1.5 * self.last_epoch
        return float(self.base_lr * self.d_model**-0.5 * min(decay, warmup))


class PiecewiseDecay(LRScheduler):
    """`values[i]` until `boundaries[i]`, and the last value after all boundaries."""

    def __init__(
        self,
        boundaries: Sequence[int],
        values: Sequence[float],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if len(boundaries) == 0:
            raise ValueError("The boundaries cannot be empty.")
        if len(values) <= len(boundaries):
            raise ValueError(
                f"The values have one element more than boundaries, but received len(values)"
                f" [{len(values)}] < len(boundaries) + 1 [{len(boundaries) + 1}]."
            )
        self.boundaries, self.values = boundaries, values
        super().__init__(last_epoch=last_epoch, verbose=verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        for boundary, value in zip(self.boundaries, self.values, strict=False):
            if self.last_epoch < boundary:
                return value
        return self.values[-1]


class _GammaDecay(LRScheduler):
    """Base of the schedules that have a `gamma` and nothing else."""

    def __init__(
        self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)


class NaturalExpDecay(_GammaDecay):
    """The rate times `exp(-gamma * epoch)`."""

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        return self.base_lr * math.exp(-self.gamma * self.last_epoch)


class InverseTimeDecay(_GammaDecay):
    """The rate divided by `1 + gamma * epoch`."""

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        return self.base_lr / (1 + self.gamma * self.last_epoch)


class ExponentialDecay(_GammaDecay):
    """The rate times `gamma ** epoch`."""

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        return float(self.base_lr * self.gamma**self.last_epoch)


class PolynomialDecay(LRScheduler):
    """From the learning rate to `end_lr` along a polynomial."""

    def __init__(
        self,
        learning_rate: float,
        decay_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(decay_steps, int) or decay_steps <= 0:
            raise ValueError(f"'decay_steps' must be a positive integer, got {decay_steps!r}.")
        if power <= 0.0:
            raise ValueError(f"'power' must be greater than 0.0, got {power!r}.")
        self.decay_steps, self.end_lr, self.power, self.cycle = decay_steps, end_lr, power, cycle
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        epoch, steps = self.last_epoch, self.decay_steps
        if self.cycle:
            steps *= math.ceil(epoch / steps) if epoch else 1
        else:
            epoch = min(epoch, steps)
        return float((self.base_lr - self.end_lr) * (1 - epoch / steps) ** self.power + self.end_lr)


class LinearWarmup(LRScheduler):
    """From `start_lr` to `end_lr`, then a rate or another scheduler."""

    learning_rate: Any

    def __init__(
        self,
        learning_rate: float | LRScheduler,
        warmup_steps: int,
        start_lr: float,
        end_lr: float,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(learning_rate, float | int | LRScheduler):
            raise TypeError(
                "the type of learning_rate should be [int, float or LRScheduler], the current type"
                f" is {learning_rate}"
            )
        if end_lr <= start_lr:
            # Paddle's exception type.
            raise AssertionError(f"end_lr {end_lr} must be greater than start_lr {start_lr}")
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.start_lr, self.end_lr = start_lr, end_lr
        super().__init__(start_lr, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        if self.last_epoch < self.warmup_steps:
            share = self.last_epoch / self.warmup_steps
            return (self.end_lr - self.start_lr) * share + self.start_lr
        if isinstance(self.learning_rate, LRScheduler):
            self.learning_rate.step(self.last_epoch - self.warmup_steps)
            return self.learning_rate()
        return float(self.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the scheduler inside."""
        state = super().state_dict()
        if isinstance(self.learning_rate, LRScheduler):
            state["LinearWarmup_LR"] = self.learning_rate.state_dict()
        return state

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with that of the scheduler inside."""
        super().set_state_dict(state_dict)
        if isinstance(self.learning_rate, LRScheduler):
            self.learning_rate.set_state_dict(state_dict["LinearWarmup_LR"])

    set_dict = set_state_dict


class MultiStepDecay(LRScheduler):
    """The rate times `gamma` after each milestone."""

    def __init__(
        self,
        learning_rate: float,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(milestones, tuple | list):
            raise TypeError(
                "The type of 'milestones' in 'MultiStepDecay' must be 'tuple, list', but received"
                f" {type(milestones)}."
            )
        if sorted(set(milestones)) != list(milestones):
            raise ValueError("The elements of milestones must be incremented")
        if gamma >= 1.0:
            raise ValueError("gamma should be < 1.0.")
        self.milestones, self.gamma = milestones, gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        passed = sum(self.last_epoch >= milestone for milestone in self.milestones)
        return float(self.base_lr * self.gamma**passed)


class StepDecay(LRScheduler):
    """The rate times `gamma` every `step_size` epochs."""

    def __init__(
        self,
        learning_rate: float,
        step_size: int,
        gamma: float = 0.1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(step_size, int):
            raise TypeError(
                f"The type of 'step_size' must be 'int', but received {type(step_size)}."
            )
        if gamma >= 1.0:
            raise ValueError("gamma should be < 1.0.")
        self.step_size, self.gamma = step_size, gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        return float(self.base_lr * self.gamma ** (self.last_epoch // self.step_size))


class LambdaDecay(LRScheduler):
    """The rate times `lr_lambda(epoch)`."""

    def __init__(
        self,
        learning_rate: float,
        lr_lambda: Callable[[int], float],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not callable(lr_lambda):
            raise TypeError(
                f"The type of 'lr_lambda' in '{type(self).__name__}' must be 'function', but"
                f" received {type(lr_lambda)}."
            )
        self.lr_lambda = lr_lambda
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        return self.base_lr * self.lr_lambda(self.last_epoch)


class MultiplicativeDecay(LambdaDecay):
    """The rate times `lr_lambda(1) * ... * lr_lambda(epoch)`."""

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        return math.prod(map(self.lr_lambda, range(1, self.last_epoch + 1)), start=self.base_lr)


class ReduceOnPlateau(LRScheduler):
    """The rate times `factor` once a metric has not improved for `patience` epochs."""

    def __init__(
        self,
        learning_rate: float,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0,
        epsilon: float = 1e-8,
        verbose: bool = False,
    ) -> None:
        if (mode := mode.lower()) not in ("min", "max"):
            raise ValueError(f"mode: {mode} is unknown!")
        if factor >= 1.0:
            raise ValueError("new_lr = origin_lr * gamma and gamma should be < 1.0.")
        if (threshold_mode := threshold_mode.lower()) not in ("rel", "abs"):
            raise ValueError(f"threshold mode: {threshold_mode} is unknown!")
        self.mode, self.factor, self.patience = mode, factor, patience
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.cooldown, self.min_lr, self.epsilon = cooldown, min_lr, epsilon
        self.cooldown_counter, self.num_bad_epochs = 0, 0
        self.best: float | None = None
        self.base_lr = self.last_lr = float(learning_rate)
        self.last_epoch, self.verbose = 0, verbose

    def state_keys(self) -> None:
        """Set `self.keys`, the names of the attributes in the state dict."""
        self.keys = ["cooldown_counter", "best", "num_bad_epochs", "last_epoch", "last_lr"]

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Compare a metric with the best one, and reduce the rate if it is time."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        value = float(metrics)
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            return
        if self.best is None or self._is_better(value, self.best):
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.num_bad_epochs > self.patience:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            reduced = max(self.last_lr * self.factor, self.min_lr)
            if self.last_lr - reduced > self.epsilon:
                self.last_lr = reduced
                self._print_rate()

    def _is_better(self, value: float, best: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        margin = self.threshold * (best if self.threshold_mode == "rel" else 1.0)
        return sign * value < sign * (best - sign * margin)


class LinearLR(LRScheduler):
    """From `start_factor` to `end_factor` times the rate in `total_steps` steps."""

    def __init__(
        self,
        learning_rate: float,
        total_steps: int,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not 0 < start_factor <= 1.0:
            raise ValueError(
                f"`start_factor` must be greater than 0 and less or equal to 1, but got"
                f" {start_factor}"
            )
        if not 0 <= end_factor <= 1.0:
            raise ValueError(
                f"`end_factor` must be greater than 0 and less than 1, but got {end_factor}"
            )
        if total_steps <= 0:
            raise ValueError(f"`total_steps` must be greater than 0, but got {total_steps}")
        self.start_factor, self.end_factor = start_factor, end_factor
        self.total_steps = total_steps
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        share = min(self.last_epoch, self.total_steps) / self.total_steps
        return self.base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.optim.lr_scheduler)
