"""MXNet's optimizers by name, with its arguments and defaults, as torch optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from mezzo._errors import nearest
from mezzo.optim.optimizers import LAMB

Parameters = list[torch.nn.Parameter]

_COMMON_ARGUMENTS = {"learning_rate": "lr", "wd": "weight_decay"}
_ADAM_ARGUMENTS = _COMMON_ARGUMENTS | {"epsilon": "eps", "beta1": "beta1", "beta2": "beta2"}


@dataclass(frozen=True)
class _OptimizerSpec:
    """The torch counterpart of an MXNet optimizer."""

    factory: Callable[..., torch.optim.Optimizer]
    argument_names: Mapping[str, str]
    """MXNet's argument names → torch's."""
    defaults: Mapping[str, Any]
    """MXNet's defaults, by torch's argument names."""


def _nesterov_sgd(parameters: Parameters, *, momentum: float, **kwargs: Any) -> torch.optim.SGD:
    # torch refuses Nesterov's momentum of 0, which is plain SGD.
    return torch.optim.SGD(parameters, momentum=momentum, nesterov=momentum != 0.0, **kwargs)


_OPTIMIZERS = {
    "sgd": _OptimizerSpec(
        torch.optim.SGD, _COMMON_ARGUMENTS | {"momentum": "momentum"}, {"lr": 0.01}
    ),
    "nag": _OptimizerSpec(
        _nesterov_sgd,
        _COMMON_ARGUMENTS | {"momentum": "momentum"},
        {"lr": 0.1, "momentum": 0.9},
    ),
    "adam": _OptimizerSpec(torch.optim.Adam, _ADAM_ARGUMENTS, {"lr": 0.001}),
    "adamw": _OptimizerSpec(torch.optim.AdamW, _ADAM_ARGUMENTS, {"lr": 0.001, "weight_decay": 0.0}),
    "adamax": _OptimizerSpec(torch.optim.Adamax, _ADAM_ARGUMENTS, {"lr": 0.002}),
    "nadam": _OptimizerSpec(
        torch.optim.NAdam, _ADAM_ARGUMENTS | {"schedule_decay": "momentum_decay"}, {"lr": 0.001}
    ),
    "adagrad": _OptimizerSpec(
        torch.optim.Adagrad,
        _COMMON_ARGUMENTS | {"epsilon": "eps", "eps": "eps"},
        {"lr": 0.01, "eps": 1e-6},
    ),
    "adadelta": _OptimizerSpec(
        torch.optim.Adadelta,
        _COMMON_ARGUMENTS | {"rho": "rho", "epsilon": "eps"},
        {"lr": 1.0, "eps": 1e-5},
    ),
    "rmsprop": _OptimizerSpec(
        torch.optim.RMSprop,
        _COMMON_ARGUMENTS
        | {
            "rho": "alpha",
            "gamma1": "alpha",
            "momentum": "momentum",
            "gamma2": "momentum",
            "epsilon": "eps",
            "centered": "centered",
        },
        {"lr": 0.001, "alpha": 0.9},
    ),
    "lamb": _OptimizerSpec(LAMB, _ADAM_ARGUMENTS, {"lr": 0.001, "weight_decay": 0.0}),
}


_IGNORED_ARGUMENTS = (
    "multi_precision",
    "lazy_update",
    "use_fused_step",
    "aggregate_num",
    "begin_num_update",
)
"""Arguments about MXNet's kernels and 16-bit weights, without effect: weights are float32."""


_NUMBERS = {"learning_rate", "wd", "momentum", "rescale_grad", "epsilon", "beta1", "beta2"}
"""Arguments whose value is checked before torch sees it."""


_TRAINER_ARGUMENTS = ("rescale_grad", "clip_gradient", "lr_scheduler")
"""Arguments that `Trainer` applies itself."""


def make_optimizer(
    name: str, parameters: Parameters, arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Create a torch optimizer from MXNet's name and arguments.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = make_optimizer("sgd", [weight], {"learning_rate": 0.1, "wd": 0.01})
    >>> optimizer.param_groups[0]["weight_decay"]
    0.01
    """
    if not isinstance(name, str):
        raise TypeError(
            "optimizer should be the name of an optimizer or one of torch.optim, got"
            f" {name if isinstance(name, type) else type(name)}. The names are:"
            f" {', '.join(_OPTIMIZERS)}."
        )
    spec = _OPTIMIZERS.get(name.lower())
    if spec is None:
        raise ValueError(
            f"Cannot find optimizer {name}. There are: {', '.join(_OPTIMIZERS)}; or pass one of"
            f" torch.optim.{nearest(name, _OPTIMIZERS)}"
        )
    kwargs = _translate_arguments(name, spec, arguments)
    if not parameters:
        raise ValueError(
            "First argument must be a list or dict of Parameters, got an empty one. Pass"
            " dict(net.named_parameters())."
        )
    return spec.factory(parameters, **kwargs)


def check_arguments(optimizer_params: Any) -> dict[str, Any]:
    """Return `optimizer_params` as a dict, or raise.

    >>> check_arguments({"learning_rate": 0.1})
    {'learning_rate': 0.1}
    """
    if optimizer_params is None:
        return {}
    if not isinstance(optimizer_params, Mapping):
        raise TypeError(
            "optimizer_params should be a dict of argument names to values, got"
            f" {type(optimizer_params).__name__}. Pass for example {{'learning_rate': 0.1}}."
        )
    arguments = dict(optimizer_params)
    scheduler = arguments.get("lr_scheduler")
    if scheduler is not None and not callable(scheduler):
        raise TypeError(
            "lr_scheduler should be a scheduler of mx.lr_scheduler, got"
            f" {type(scheduler).__name__}. One of torch is constructed with trainer.optimizer."
        )
    for name in _NUMBERS & arguments.keys():
        check_number(name, arguments[name])
    return arguments


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """Return a number that is not negative, or with `positive` greater than 0; otherwise raise.

    >>> check_number("batch_size", 8, positive=True)
    8.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} should be a number, got {type(value).__name__} {value!r}.")
    number = float(value)
    if math.isnan(number) or number < 0.0 or (positive and number == 0.0):
        least = "greater than 0" if positive else "at least 0"
        raise ValueError(f"{name} should be a number {least}, got {value!r}.")
    return number


def _translate_arguments(
    name: str, spec: _OptimizerSpec, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    kwargs = dict(spec.defaults)
    for argument, value in arguments.items():
        if argument in (*_IGNORED_ARGUMENTS, *_TRAINER_ARGUMENTS):
            continue
        if argument not in spec.argument_names:
            allowed = ", ".join([*spec.argument_names, *_TRAINER_ARGUMENTS])
            raise TypeError(
                f"The optimizer {name!r} got an unexpected keyword argument {argument!r}. It takes:"
                f" {allowed}.{nearest(str(argument), spec.argument_names)}"
            )
        kwargs[spec.argument_names[argument]] = value
    if {"beta1", "beta2"} & kwargs.keys():
        kwargs["betas"] = (kwargs.pop("beta1", 0.9), kwargs.pop("beta2", 0.999))
    return kwargs
