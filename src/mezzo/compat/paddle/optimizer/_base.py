"""Base class of Paddle's optimizers, and their arguments translated to torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.compat.paddle.amp._decorate import register_optimizer
from mezzo.compat.paddle.nn._clip import Clip, clip_before_step, shared_clip_norm
from mezzo.compat.paddle.optimizer._lr_scheduler import LRScheduler
from mezzo.compat.paddle.static._program import Variable, in_dynamic_mode
from mezzo.compat.paddle.static._training import Precision, attach_trainer
from mezzo.optim.bind_optimizer import bind_half_parameters
from mezzo.policy.types import Master
from mezzo.scaling.gradients import parameters

Parameters = Iterable[Any] | None
LearningRate = float | LRScheduler
Decay = Any
"""A number, or a regularizer such as `L2Decay` that has one."""

_SCHEDULER = "LR_Scheduler"
"""Key of the scheduler's state in a state dict, as in Paddle."""
_LR_RATIO = "lr_ratio"
"""Key of a group for its learning rate relative to the optimizer's."""
_GROUP_OPTIONS = {
    "epsilon": "eps",
    "rho": "rho",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
}
"""Option of a parameter group in Paddle → in torch."""


class Optimizer(torch.optim.Optimizer):
    """`paddle.optimizer.Optimizer`: a torch optimizer with Paddle's methods.

    Subclasses are torch optimizers, so torch's schedulers and mezzo's scaler work with them.
    """

    _grad_clip: Clip | None = None
    _multi_precision = False
    _scheduler: LRScheduler | None = None

    def _finish_init(
        self, learning_rate: LearningRate, grad_clip: Any, *, multi_precision: bool = False
    ) -> None:
        """Apply the arguments that torch's constructors do not have."""
        if grad_clip is not None and not callable(grad_clip):
            raise TypeError(
                "'grad_clip' should be an instance of GradientClipBase's derived class, got"
                f" {grad_clip!r}. Use nn.ClipGradByGlobalNorm(clip_norm=1.0)."
            )
        self._grad_clip, self._multi_precision = grad_clip, bool(multi_precision)
        if grad_clip is not None:
            self.register_step_pre_hook(clip_before_step)
        if any(parameter.dtype in HALF_DTYPES for parameter in parameters(self)):
            # Paddle's optimizers always compute in float32; masters need multi_precision=True.
            bind_half_parameters(
                self,
                Master.FLOAT32 if multi_precision else Master.NONE,
                clip_norm=shared_clip_norm([self]),
            )
        register_optimizer(self)
        if isinstance(learning_rate, LRScheduler):
            self.set_lr_scheduler(learning_rate)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Zero the gradients, as Paddle does by default; `set_to_zero=False` sets them to None."""
        self.zero_grad(set_to_none=not set_to_zero)

    clear_gradients = clear_grad

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[Any, Any]:
        """Step with the gradients of `loss.backward()`, or make a static program train.

        For the loss of a static program, every `Executor.run` trains from then on.
        """
        if isinstance(loss, torch.Tensor) and not isinstance(loss, Variable):
            self.step()
            return None, [
                (parameter, parameter.grad)
                for group in self.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
        if not isinstance(loss, Variable) and not callable(loss):
            # Paddle's exception type.
            raise AssertionError(
                f"The loss should be a Tensor, got {type(loss).__name__}. Pass the loss itself, or"
                " a static program's."
            )
        attach_trainer(loss, self, Precision())
        return [], []

    @property
    def _learning_rate(self) -> LearningRate:
        """The scheduler or the rate: a private attribute of Paddle's that programs read."""
        return self.get_lr() if self._scheduler is None else self._scheduler

    def get_lr(self) -> float:
        """Return the current learning rate."""
        if self._scheduler is not None:
            return self._scheduler()
        first = self.param_groups[0]
        return float(first["lr"]) / float(first.get(_LR_RATIO, 1.0))

    def set_lr(self, value: float) -> None:
        """Set the learning rate of an optimizer without a scheduler."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                "The type of 'value' in optimizer.set_lr must be float, but received"
                f" {type(value).__name__}."
            )
        if self._scheduler is not None:
            raise RuntimeError(
                "optimizer's learning rate can't be LRScheduler when invoke this API, because this"
                " will lead to conflict. Call step() of the scheduler."
            )
        self._apply_learning_rate(value)

    def set_lr_scheduler(self, scheduler: LRScheduler) -> None:
        """Take the learning rate from a scheduler from now on."""
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                "The type of 'scheduler' in optimizer.set_lr_scheduler must be LRScheduler, but"
                f" received {type(scheduler).__name__}. Pass one of paddle.optimizer.lr."
            )
        if self._scheduler is not None:
            self._scheduler.detach(self)
        self._scheduler = scheduler
        scheduler.attach(self)

    def _apply_learning_rate(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value * group.get(_LR_RATIO, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, and that of the scheduler as `LR_Scheduler`."""
        state = super().state_dict()
        if self._scheduler is not None:
            state[_SCHEDULER] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; without an `LR_Scheduler` the rate stays that of the scheduler."""
        super().load_state_dict(state_dict)
        if self._scheduler is not None:
            if _SCHEDULER in state_dict:
                self._scheduler.set_state_dict(state_dict[_SCHEDULER])
            self._apply_learning_rate(self._scheduler())

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; Paddle's name of torch's `load_state_dict`."""
        self.load_state_dict(state_dict)

    set_dict = set_state_dict


def parse_learning_rate(learning_rate: Any) -> float:
    """Return the first learning rate, of a number or a scheduler."""
    if isinstance(learning_rate, LRScheduler):
        return learning_rate()
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
        raise TypeError(
            "learning rate should be float or LRScheduler, got"
            f" {type(learning_rate).__name__} here. Pass a number or one of paddle.optimizer.lr."
            " A scheduler of torch is constructed with the optimizer."
        )
    return float(learning_rate)


def parse_parameters(
    params: Parameters,
    learning_rate: Any,
    *,
    decays: Callable[[Any], bool] | None = None,
    ratio: Callable[[Any], float] | None = None,
    decoupled: bool = False,
) -> Any:
    """Return parameters or groups as torch's optimizers take them.

    A group's learning rate is a multiple of the optimizer's, as in Paddle. Parameters with a
    `ParamAttr(learning_rate=, regularizer=)`, with a `ratio` other than 1 or for which `decays` is
    False get groups of their own. `decoupled` says that the optimizer's weight decay is no
    regularizer.
    """
    if params is None and not in_dynamic_mode() and decays is ratio is None:
        # `minimize` adds the parameters of the program.
        return [{"params": [], "lr": parse_learning_rate(learning_rate), _LR_RATIO: 1.0}]
    if params is None:
        raise AttributeError(
            "parameters argument given to the Optimizer should not be None. Pass"
            " parameters=model.parameters(). Only optimizers of static programs, made after"
            " paddle.enable_static(), find their parameters."
        )
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "`parameters` argument given to the optimizer should be an iterable of Tensors, but"
            f" got argument type is `{type(params).__name__}`. Pass model.parameters(), or a list."
        )
    entries, rate = list(params), parse_learning_rate(learning_rate)
    are_groups = any(isinstance(entry, dict) for entry in entries)
    groups = entries if are_groups else [{"params": entries}]
    parsed: list[dict[str, Any]] = []
    for group in groups:
        split: dict[Any, list[Any]] = {}
        options = _parse_group(group, rate)
        members = options.pop("params")
        for parameter in [members] if isinstance(members, torch.Tensor) else members:
            key = _own_options(parameter, decays, ratio, decoupled=decoupled)
            split.setdefault(key, []).append(parameter)
        for (factor, decay), chosen in split.items():
            own = {"lr": options["lr"] * factor, _LR_RATIO: options[_LR_RATIO] * factor}
            if decay is not None:
                own["weight_decay"] = decay
            parsed.append({**options, **own, "params": chosen})
    is_plain = len(parsed) == 1 and parsed[0].keys() == {"params", "lr", _LR_RATIO}
    if not are_groups and is_plain and parsed[0][_LR_RATIO] == 1.0:
        return entries
    return parsed or entries


def decay_by_name(function: Callable[[str], bool] | None) -> Callable[[Any], bool] | None:
    """Return `apply_decay_param_fun` as a function of the parameter."""
    if function is None:
        return None

    def decays(parameter: Any) -> bool:
        if parameter.name is None:
            raise ValueError(
                "apply_decay_param_fun needs names, and a parameter of a torch module has none."
                " Pass groups: parameters=[{'params': ..., 'weight_decay': 0.0}, ...]."
            )
        return bool(function(parameter.name))

    return decays


def parse_weight_decay(weight_decay: Decay) -> float:
    """Return a weight decay: a number, or the coefficient of a regularizer such as L2Decay."""
    value = (
        0.0
        if weight_decay is None
        else getattr(weight_decay, "coeff", getattr(weight_decay, "_coeff", weight_decay))
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            "weight_decay should be float, int or a regularizer with a coefficient, but received"
            f" {type(weight_decay).__name__}."
        )
    return float(value)


def _own_options(
    parameter: Any,
    decays: Callable[[Any], bool] | None,
    ratio: Callable[[Any], float] | None,
    *,
    decoupled: bool,
) -> tuple[float, float | None]:
    """Return a parameter's multiple of the learning rate and its weight decay, if it has one."""
    attribute = getattr(parameter, "optimize_attr", {}).get("learning_rate", 1.0)
    factor = attribute * (1.0 if ratio is None else ratio(parameter))
    decay = None if decays is None or decays(parameter) else 0.0
    regularizer = getattr(parameter, "regularizer", None)
    if regularizer is not None:
        coefficient = parse_weight_decay(regularizer)
        if decoupled and coefficient:
            raise ValueError(
                f"ParamAttr(regularizer={regularizer!r}) with AdamW or Lamb would add a second"
                " weight decay to the decoupled one, which is not supported. Pass groups:"
                " parameters=[{'params': ..., 'weight_decay': 0.1}, ...]."
            )
        decay = decay if decoupled else coefficient
    return float(factor), decay


def _parse_group(group: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    options = dict(group)
    ratio = float(options.pop("learning_rate", 1.0))
    parsed = {"params": options.pop("params"), "lr": learning_rate * ratio, _LR_RATIO: ratio}
    if "beta1" in options or "beta2" in options:
        parsed["betas"] = (options.pop("beta1", 0.9), options.pop("beta2", 0.999))
    if unknown := options.keys() - _GROUP_OPTIONS.keys():
        raise ValueError(
            f"Unknown options of a parameter group: {', '.join(sorted(unknown))}. Allowed are"
            f" params, learning_rate, beta1, beta2, {', '.join(_GROUP_OPTIONS)}."
        )
    return parsed | {
        _GROUP_OPTIONS[name]: parse_weight_decay(value) if name == "weight_decay" else value
        for name, value in options.items()
    }
