"""What every optimizer of Paddle's has beside torch's: its arguments' names, clipping, `clear_grad` and `minimize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.compat.paddle.amp._decorate import register_optimizer
from mezzo.compat.paddle.nn import Clip, clip_before_step, norm_for_all
from mezzo.compat.paddle.static._program import Variable
from mezzo.compat.paddle.static._training import Precision, close
from mezzo.optim.attach import bind_half_parameters
from mezzo.policy.types import Master
from mezzo.scaling.gradients import parameters

Parameters = Iterable[Any] | None
Decay = Any
"""A number, or a regularizer that has one."""

_RATIO = "lr_ratio"
"""A group's rate over the optimizer's, under which Paddle gives it."""
_GROUP_WORDS = {
    "epsilon": "eps",
    "rho": "rho",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
}


class Optimizer(torch.optim.Optimizer):
    """torch's optimizers under Paddle's names: what is made from one is a `torch.optim.Optimizer`, for torch's schedulers and mezzo's scaler alike."""

    _grad_clip: Clip | None = None
    _multi_precision = False

    def _equip(self, grad_clip: Any, *, multi_precision: bool = False) -> None:
        """Take what torch's constructors have no word for."""
        if grad_clip is not None and not callable(grad_clip):
            raise TypeError(
                "'grad_clip' should be an instance of GradientClipBase's derived class, got"
                f" {grad_clip!r}. Use nn.ClipGradByGlobalNorm(clip_norm=1.0)."
            )
        self._grad_clip, self._multi_precision = grad_clip, bool(multi_precision)
        if grad_clip is not None:
            self.register_step_pre_hook(clip_before_step)
        if any(one.dtype in HALF_DTYPES for one in parameters(self)):
            # Paddle's optimizers compute in float32 whatever they step, and keep masters where they
            # are told to.
            bind_half_parameters(
                self,
                Master.FLOAT32 if multi_precision else Master.NONE,
                clip_norm=norm_for_all([self]),
            )
        register_optimizer(self)

    # Paddle's call shape.
    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget the gradients: zeros by default, as in Paddle; `set_to_zero=False` gives their memory back."""
        self.zero_grad(set_to_none=not set_to_zero)

    clear_gradients = clear_grad

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[Any, Any]:
        """Update from the gradients that `loss.backward()` left; of a static program's loss, close the program: `Executor.run` trains it from then on."""
        if isinstance(loss, torch.Tensor) and not isinstance(loss, Variable):
            self.step()
            return None, [
                (one, one.grad)
                for group in self.param_groups
                for one in group["params"]
                if one.grad is not None
            ]
        if not isinstance(loss, Variable) and not callable(loss):
            # Paddle's.
            raise AssertionError(
                f"The loss should be a Tensor, got {type(loss).__name__}. Pass the loss itself, or"
                " a static program's."
            )
        close(loss, self, Precision())
        return [], []

    def get_lr(self) -> float:
        """The learning rate now."""
        return float(self.param_groups[0]["lr"]) / float(self.param_groups[0].get(_RATIO, 1.0))

    def set_lr(self, value: float) -> None:
        """Set the learning rate."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                "The type of 'value' in optimizer.set_lr must be float, but received"
                f" {type(value).__name__}."
            )
        for group in self.param_groups:
            group["lr"] = value * group.get(_RATIO, 1.0)

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's `load_state_dict`, under Paddle's name."""
        self.load_state_dict(state_dict)


def rate_of(learning_rate: Any) -> float:
    """A learning rate; Paddle's schedulers are torch's here."""
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
        raise TypeError(
            f"learning rate should be float, got {type(learning_rate).__name__} here. Schedules are"
            " torch's: make the optimizer with the first rate, then"
            " torch.optim.lr_scheduler.StepLR(optimizer, ...)."
        )
    return float(learning_rate)


def parameters_of(given: Parameters, learning_rate: Any) -> Any:
    """Parameters as torch's optimizers take them; a group's learning rate is a multiple of the optimizer's, as in Paddle."""
    if given is None:
        raise AttributeError(
            "parameters argument given to the Optimizer should not be None. Pass"
            " parameters=model.parameters(), in static programs too."
        )
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(
            "`parameters` argument given to the optimizer should be an iterable of Tensors, but"
            f" got argument type is `{type(given).__name__}`. Pass model.parameters(), or a list."
        )
    several = list(given)
    return (
        [_group(one, rate_of(learning_rate)) for one in several]
        if any(isinstance(one, dict) for one in several)
        else several
    )


def decay_of(weight_decay: Decay) -> float:
    """A weight decay: a number, or a regularizer such as L2Decay, which has one."""
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


def _group(group: dict[str, Any], rate: float) -> dict[str, Any]:
    words = dict(group)
    ratio = float(words.pop("learning_rate", 1.0))
    made = {"params": words.pop("params"), "lr": rate * ratio, _RATIO: ratio}
    if "beta1" in words or "beta2" in words:
        made["betas"] = (words.pop("beta1", 0.9), words.pop("beta2", 0.999))
    if strange := words.keys() - _GROUP_WORDS.keys():
        raise ValueError(
            f"A group of parameters has {', '.join(sorted(strange))}, which no optimizer here"
            " knows. It may have params, learning_rate, weight_decay."
        )
    return made | {
        _GROUP_WORDS[name]: decay_of(value) if name == "weight_decay" else value
        for name, value in words.items()
    }
