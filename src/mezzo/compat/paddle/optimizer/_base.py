"""Base class of Paddle's optimizers, and their arguments translated to torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.compat.paddle.amp._decorate import register_optimizer
from mezzo.compat.paddle.nn._clip import Clip, clip_before_step, shared_clip_norm
from mezzo.compat.paddle.static._program import Variable
from mezzo.compat.paddle.static._training import Precision, attach_trainer
from mezzo.optim.bind_optimizer import bind_half_parameters
from mezzo.policy.types import Master
from mezzo.scaling.gradients import parameters

Parameters = Iterable[Any] | None
Decay = Any
"""A number, or a regularizer such as `L2Decay` that has one."""

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

    def _finish_init(self, grad_clip: Any, *, multi_precision: bool = False) -> None:
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

    def get_lr(self) -> float:
        """Return the current learning rate."""
        first = self.param_groups[0]
        return float(first["lr"]) / float(first.get(_LR_RATIO, 1.0))

    def set_lr(self, value: float) -> None:
        """Set the learning rate."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                "The type of 'value' in optimizer.set_lr must be float, but received"
                f" {type(value).__name__}."
            )
        for group in self.param_groups:
            group["lr"] = value * group.get(_LR_RATIO, 1.0)

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; Paddle's name of torch's `load_state_dict`."""
        self.load_state_dict(state_dict)


def parse_learning_rate(learning_rate: Any) -> float:
    """Return a learning rate; raise for a scheduler, which must be torch's."""
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
        raise TypeError(
            f"learning rate should be float, got {type(learning_rate).__name__} here. Schedules are"
            " torch's: construct the optimizer with the first rate, then"
            " torch.optim.lr_scheduler.StepLR(optimizer, ...)."
        )
    return float(learning_rate)


def parse_parameters(params: Parameters, learning_rate: Any) -> Any:
    """Return parameters or groups as torch's optimizers take them.

    A group's learning rate is a multiple of the optimizer's, as in Paddle.
    """
    if params is None:
        raise AttributeError(
            "parameters argument given to the Optimizer should not be None. Pass"
            " parameters=model.parameters(), in static programs too."
        )
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "`parameters` argument given to the optimizer should be an iterable of Tensors, but"
            f" got argument type is `{type(params).__name__}`. Pass model.parameters(), or a list."
        )
    entries = list(params)
    if any(isinstance(entry, dict) for entry in entries):
        return [_parse_group(entry, parse_learning_rate(learning_rate)) for entry in entries]
    return entries


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
