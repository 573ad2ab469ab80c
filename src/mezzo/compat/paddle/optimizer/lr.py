"""`paddle.optimizer.lr`: schedules of the learning rate, passed as `learning_rate=`.

The formulas are those of PaddlePaddle 3.3.1 (python/paddle/optimizer/lr.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS

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


class Scheduled(Protocol):
    """An optimizer whose learning rate a scheduler sets."""

    def _apply_learning_rate(self, value: float) -> None: ...


class LRScheduler:
    """`paddle.optimizer.lr.LRScheduler`: base class; define `get_lr` with `self.last_epoch`.

    Call `step()` after each update, or after each epoch. The optimizers that it was passed to have
    the new rate at once.

    >>> from mezzo.compat import paddle
    >>> scheduler = StepDecay(learning_rate=1.0, step_size=2)
    >>> layer = paddle.nn.Linear(1, 1)
    >>> optimizer = paddle.optimizer.SGD(scheduler, parameters=layer.parameters())
    >>> for _ in range(2):
    ...     scheduler.step()
    >>> optimizer.get_lr()
    0.1
    """

    keys: Sequence[str]

    def __init__(
        self, learning_rate: float = 0.1, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        if not isinstance(learning_rate, float | int):
            raise TypeError(
                f"The type of learning rate must be float, but received {type(learning_rate)}"
            )
        if learning_rate < 0:
            raise ValueError(f"Invalid learning rate: {learning_rate}")
        self.base_lr = float(learning_rate)
        self.last_lr = float(learning_rate)
        self.last_epoch = last_epoch
        self.verbose = verbose
        self.step()

    def __call__(self) -> float:
        """Return the current learning rate."""
        return self.last_lr

    @property
    def last_lr(self) -> float:
        """The current learning rate; setting it sets that of the optimizers too."""
        return self._last_lr

    @last_lr.setter
    def last_lr(self, value: float) -> None:
        self._last_lr = value
        for optimizer in self.__dict__.get("_optimizers", ()):
            optimizer._apply_learning_rate(value)

    def attach(self, optimizer: Scheduled) -> None:
        """Set the learning rate of an optimizer from now on."""
        self.__dict__.setdefault("_optimizers", weakref.WeakSet()).add(optimizer)
        optimizer._apply_learning_rate(self.last_lr)

    def detach(self, optimizer: Scheduled) -> None:
        """Set the learning rate of an optimizer no longer."""
        self.__dict__["_optimizers"].discard(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to the one that is passed, and compute its learning rate."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        closed_form = None if epoch is None else getattr(self, "_get_closed_form_lr", None)
        self.last_lr = self.get_lr() if closed_form is None else closed_form()
        self._print_rate()

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`; subclasses define it."""
        raise NotImplementedError(f"Define get_lr() in {type(self).__name__}.")

    def state_keys(self) -> None:
        """Set `self.keys`, the names of the attributes in the state dict."""
        self.keys = ["last_epoch", "last_lr"]

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that `state_keys` names."""
        self.state_keys()
        return {key: getattr(self, key) for key in self.keys if hasattr(self, key)}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the attributes that `state_keys` names."""
        self.state_keys()
        for key in self.keys:
            if key not in state_dict:
                raise RuntimeError(
                    "Please check whether state_dict is correct for optimizer. Can't find"
                    f" [ {key} ] in state_dict"
                )
            setattr(self, key, state_dict[key])

    set_dict = set_state_dict

    def _print_rate(self) -> None:
        if self.verbose:
            print(  # noqa: T201 - what verbose=True asks for
                f"Epoch {self.last_epoch}: {type(self).__name__} set learning rate to"
                f" {self.last_lr}."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy schedules no optimizer.
        return {name: value for name, value in self.__dict__.items() if name != "_optimizers"}


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


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.optim.lr_scheduler)
