"""What the fused step must know of each optimizer: its states, and its hyper-parameters in the order that the kernel reads them."""

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
    """One optimizer, as the kernels carry it out."""

    code: str
    """The kernel's name for it."""
    states: Callable[[Group], tuple[str, ...]]
    """The state tensors of a parameter, at most three."""
    variant: Callable[[Group], bool]
    """Which of its two forms the kernel takes: with momentum, with amsgrad."""
    hyper: Callable[[Group], tuple[Number, ...]]
    """Weight decay and four numbers more: what the kernel calls one, two, three and flag."""
    has_step_count: bool = True
    """Whether steps are counted in the optimizer's state."""
    initial: Callable[[Group], float] = lambda _: 0.0
    """What a state starts from."""

    def numbers(self, group: Group) -> tuple[Number, ...]:
        """A group's hyper-parameters, the learning rate first."""
        return (group["lr"], -1.0 if group.get("maximize") else 1.0, *self.hyper(group))


def _adam(group: Group) -> tuple[Number, ...]:
    return (
        group["weight_decay"],
        *group["betas"],
        group["eps"],
        float(bool(group.get("decoupled_weight_decay"))),
    )


def _has_momentum(group: Group) -> bool:
    """Asked of a number alone: a scheduled momentum is a tensor, and to read it would wait for the device."""
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
"""The optimizers with a fused step. By exact type: a subclass may do something else."""


def algorithm_name(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Whose step an optimizer has: its own class's, or that which a subclass that only renames names in `steps_as`.

    >>> class Renamed(torch.optim.SGD):
    ...     steps_as = torch.optim.SGD
    >>> algorithm_name(Renamed([torch.nn.Parameter(torch.ones(1))], lr=0.1)).__name__
    'SGD'
    """
    kind = type(optimizer)
    # Its own word alone: what inherits from it may do something else again.
    named: type[torch.optim.Optimizer] = vars(kind).get("steps_as", kind)
    return named
