"""Schedules of `paddle.optimizer.lr` along a cosine: annealing, warm restarts and one cycle."""

from __future__ import annotations

import math

from mezzo.compat.paddle.optimizer._lr_scheduler import LRScheduler


class CosineAnnealingDecay(LRScheduler):
    """Along a cosine from the learning rate to `eta_min` in `T_max` epochs, and back."""

    def __init__(
        self,
        learning_rate: float,
        T_max: int,
        eta_min: float = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(T_max, int):
            raise TypeError(
                "The type of 'T_max' in 'CosineAnnealingDecay' must be 'int', but received"
                f" {type(T_max)}."
            )
        if T_max <= 0:
            # Paddle's exception type.
            raise AssertionError(f"'T_max' must be a positive integer, got {T_max}.")
        self.T_max, self.eta_min = T_max, float(eta_min)
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`, computed from the last one."""
        if self.last_epoch == 0:
            return self.base_lr
        if (self.last_epoch - 1 - self.T_max) % (2 * self.T_max) == 0:
            span = self.base_lr - self.eta_min
            return self.last_lr + span * (1 - math.cos(math.pi / self.T_max)) / 2
        ratio = (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / (
            1 + math.cos(math.pi * (self.last_epoch - 1) / self.T_max)
        )
        return ratio * (self.last_lr - self.eta_min) + self.eta_min

    def _get_closed_form_lr(self) -> float:
        share = (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / 2
        return self.eta_min + (self.base_lr - self.eta_min) * share


class CosineAnnealingWarmRestarts(LRScheduler):
    """Along a cosine to `eta_min`, again and again; each cycle is `T_mult` times as long."""

    def __init__(
        self,
        learning_rate: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if T_0 <= 0 or not isinstance(T_0, int):
            raise ValueError(f"Expected positive integer T_0, but got {T_0}")
        if T_mult < 1 or not isinstance(T_mult, int):
            raise ValueError(f"Expected integer T_mult >= 1, but got {T_mult}")
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        epoch, length = self.last_epoch, self.T_0
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
        share = (1 + math.cos(math.pi * epoch / length)) / 2
        return self.eta_min + (self.base_lr - self.eta_min) * share


class OneCycleLR(LRScheduler):
    """Up to `max_learning_rate`, and down to `end_learning_rate`, in `total_steps` steps."""

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        divide_factor: float = 25.0,
        end_learning_rate: float = 0.0001,
        phase_pct: float = 0.3,
        anneal_strategy: str = "cos",
        three_phase: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(
                "'anneal_strategy' must by one of 'cos' or 'linear', but received"
                f" {anneal_strategy}"
            )
        if not 0 <= phase_pct <= 1:
            raise ValueError(f"'phase_pct' must be between 0 and 1, but received {phase_pct}")
        initial, peak = max_learning_rate / divide_factor, phase_pct * total_steps - 1
        turns = [(0.0, initial), (peak, max_learning_rate)]
        if three_phase:
            turns.append((2 * peak, initial))
        self.turns = [*turns, (total_steps - 1.0, end_learning_rate)]
        """Steps at which the direction changes, with the rate there."""
        self.total_steps, self.anneal_strategy = total_steps, anneal_strategy
        super().__init__(initial, last_epoch, verbose)

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`."""
        step = self.last_epoch
        if step > self.total_steps:
            raise ValueError(
                f"Tried to step {step} times. However the number of total steps is"
                f" {self.total_steps}"
            )
        phases = list(zip(self.turns, self.turns[1:], strict=False))
        (begin, low), (end, high) = next(
            (phase for phase in phases if step <= phase[1][0]), phases[-1]
        )
        share = (step - begin) / (end - begin)
        if self.anneal_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2
        return low + (high - low) * share
