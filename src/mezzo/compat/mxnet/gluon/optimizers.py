"""MXNet's optimizers by name, as torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mezzo._errors import nearest
from mezzo.optim.lamb import LAMB

Parameters = list[torch.nn.Parameter]

_RATES = {"learning_rate": "lr", "wd": "weight_decay"}
_ADAM = _RATES | {"epsilon": "eps", "beta1": "beta1", "beta2": "beta2"}


@dataclass(frozen=True)
class Known:
    """An optimizer of MXNet's, in torch's words."""

    make: Callable[..., torch.optim.Optimizer]
    words: Mapping[str, str]
    """Its arguments there → here."""
    defaults: Mapping[str, Any]
    """Its defaults, in words of here."""


_OPTIMIZERS = {
    "sgd": Known(torch.optim.SGD, _RATES | {"momentum": "momentum"}, {"lr": 0.01}),
    "nag": Known(partial(torch.optim.SGD, nesterov=True), _RATES | {"momentum": "momentum"}, {"lr": 0.1, "momentum": 0.9}),
    "adam": Known(torch.optim.Adam, _ADAM, {"lr": 0.001}),
    "adamw": Known(torch.optim.AdamW, _ADAM, {"lr": 0.001, "weight_decay": 0.0}),
    "adamax": Known(torch.optim.Adamax, _ADAM, {"lr": 0.002}),
    "nadam": Known(torch.optim.NAdam, _ADAM | {"schedule_decay": "momentum_decay"}, {"lr": 0.001}),
    "adagrad": Known(torch.optim.Adagrad, _RATES | {"epsilon": "eps", "eps": "eps"}, {"lr": 0.01, "eps": 1e-6}),
    "adadelta": Known(torch.optim.Adadelta, _RATES | {"rho": "rho", "epsilon": "eps"}, {"lr": 1.0, "eps": 1e-5}),
    "rmsprop": Known(
        torch.optim.RMSprop,
        _RATES | {"rho": "alpha", "gamma1": "alpha", "momentum": "momentum", "gamma2": "momentum", "epsilon": "eps", "centered": "centered"},
        {"lr": 0.001, "alpha": 0.9},
    ),
    "lamb": Known(LAMB, _ADAM, {"lr": 0.001, "weight_decay": 0.0}),
}

_HINTS = ("multi_precision", "lazy_update", "use_fused_step", "aggregate_num", "begin_num_update")
"""Words about MXNet's kernels and its 16-bit weights: weights are float32 here."""
OUTSIDE = ("rescale_grad", "clip_gradient")
"""Words that the trainer itself acts on."""


def make(name: str, parameters: Parameters, words: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer from its name and its arguments there.

    >>> make("sgd", [torch.nn.Parameter(torch.ones(1))], {"learning_rate": 0.1, "wd": 0.01}).param_groups[0]["weight_decay"]
    0.01
    """
    known = _OPTIMIZERS.get(name.lower())
    if known is None:
        raise ValueError(f"Cannot find optimizer {name}. There are: {', '.join(_OPTIMIZERS)}; or pass one of torch.optim.{nearest(name, _OPTIMIZERS)}")
    return known.make(parameters, **_translated(name, known, {word: value for word, value in words.items() if word not in (*_HINTS, *OUTSIDE)}))


def _translated(name: str, known: Known, words: Mapping[str, Any]) -> dict[str, Any]:
    for word in words:
        if word not in known.words:
            allowed = ", ".join([*known.words, *OUTSIDE])
            raise TypeError(f"The optimizer {name!r} got an unexpected keyword argument {word!r}. It takes: {allowed}.{nearest(word, known.words)}")
    said = dict(known.defaults) | {known.words[word]: value for word, value in words.items()}
    if {"beta1", "beta2"} & said.keys():
        said["betas"] = (said.pop("beta1", 0.9), said.pop("beta2", 0.999))
    return said
