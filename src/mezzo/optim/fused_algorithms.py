"""Optimizers with a fused step: the states and hyper-parameters that the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mezzo.optim.optimizers import LAMB, Lion

Group = Mapping[str, Any]
Number = float | torch.Tensor


@dataclass(frozen=True)
class Algorithm:
    """One update rule of the Triton kernels."""

    code: str
    """Name of its constant in `triton_coefficients.py`."""
    states: Callable[[Group], tuple[str, ...]]
    """Names of the state tensors of a parameter, at most three."""
    variant: Callable[[Group], bool]
    """Whether the kernel runs the variant: SGD with momentum, Adam with amsgrad."""
    hyper: Callable[[Group], tuple[Number, ...]]
    """Weight decay and four more numbers: `first`, `second`, `third` and `flag` in
    `triton_coefficients._prepare`."""
    has_step_count: bool = True
    """Whether the optimizer's state has a `step`."""
    initial: Callable[[Group], float] = lambda _: 0.0
    """Initial value of the states."""

    def numbers(self, group: Group) -> tuple[Number, ...]:
        """Return a group's hyper-parameters in the order of the kernel, the learning rate first."""
        return (group["lr"], -1.0 if group.get("maximize") else 1.0, *self.hyper(group))


def _adam(group: Group) -> tuple[Number, ...]:
    return (
        group["weight_decay"],
        *group["betas"],
        group["eps"],
        float(bool(group.get("decoupled_weight_decay"))),
    )


def _has_momentum(group: Group) -> bool:
    # A scheduled momentum is a tensor: reading it would synchronize.
    return isinstance(group["momentum"], torch.Tensor) or bool(group["momentum"])


_SGD = Algorithm(
    "SGD",
    states=lambda group: ("momentum_buffer",) if _has_momentum(group) else (),
    variant=_has_momentum,
    hyper=lambda group: (
        group["weight_decay"],
        group["momentum"],
        1.0 - group["dampening"],
        0.0,
        float(group["nesterov"]),
    ),
    has_step_count=False,
)
_ADAM = Algorithm(
    "ADAM",
    states=lambda group: (
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if group["amsgrad"]
        else ("exp_avg", "exp_avg_sq")
    ),
    variant=lambda group: bool(group["amsgrad"]),
    hyper=_adam,
)
_ADAGRAD = Algorithm(
    "ADAGRAD",
    states=lambda _: ("sum",),
    variant=lambda _: False,
    hyper=lambda group: (group["weight_decay"], group["lr_decay"], 0.0, group["eps"], 0.0),
    initial=lambda group: group["initial_accumulator_value"],
)
_LION = Algorithm(
    "LION",
    states=lambda _: ("exp_avg",),
    variant=lambda _: False,
    hyper=lambda group: (group["weight_decay"], *group["betas"], 0.0, 0.0),
    has_step_count=False,
)
_LAMB = Algorithm(
    "LAMB", states=lambda _: ("exp_avg", "exp_avg_sq"), variant=lambda _: False, hyper=_adam
)

ALGORITHMS: dict[type[torch.optim.Optimizer], Algorithm] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: _ADAGRAD,
    Lion: _LION,
    LAMB: _LAMB,
}
"""The optimizers with a fused step, by exact type: a subclass may override `step`."""


def algorithm_name(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class whose step an optimizer runs: its own, or the `steps_as` of its class.

    A subclass that changes the constructor only sets `steps_as` to the class it renames.

    >>> class Renamed(torch.optim.SGD):
    ...     steps_as = torch.optim.SGD
    >>> algorithm_name(Renamed([torch.nn.Parameter(torch.ones(1))], lr=0.1)).__name__
    'SGD'
    """
    own_class = type(optimizer)
    # `steps_as` is not inherited: a subclass may override `step` again.
    algorithm: type[torch.optim.Optimizer] = vars(own_class).get("steps_as", own_class)
    return algorithm


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step is torch's or mezzo's."""
    return algorithm_name(optimizer).__module__.startswith(("torch.optim.", "mezzo.optim."))


def without_hooks(step: Any) -> Callable[..., Any]:
    """Return the step of an optimizer class without torch's wrapper that runs step hooks."""
    function: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return function
