"""Paddle's optimizers as subclasses of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

import mezzo
from mezzo.compat.paddle.nn import refuse
from mezzo.compat.paddle.optimizer._base import (
    Decay,
    Optimizer,
    Parameters,
    decay_of,
    parameters_of,
    rate_of,
)


class Adagrad(Optimizer, torch.optim.Adagrad):
    """Adagrad."""

    steps_as = torch.optim.Adagrad

    def __init__(
        self,
        learning_rate: float,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        words: dict[str, Any] = {
            "eps": epsilon,
            "weight_decay": decay_of(weight_decay),
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(
            parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words
        )
        self._equip(grad_clip)


class Adadelta(Optimizer, torch.optim.Adadelta):
    """Adadelta."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            parameters_of(parameters, learning_rate),
            lr=rate_of(learning_rate),
            rho=rho,
            eps=epsilon,
            weight_decay=decay_of(weight_decay),
        )
        self._equip(grad_clip)


class RMSProp(Optimizer, torch.optim.RMSprop):
    """RMSProp, as torch computes it: `epsilon` is added to the root, where Paddle adds it under the root."""

    def __init__(
        self,
        learning_rate: float,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        words: dict[str, Any] = {
            "alpha": rho,
            "eps": epsilon,
            "momentum": momentum,
            "centered": centered,
            "weight_decay": decay_of(weight_decay),
        }
        super().__init__(
            parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words
        )
        self._equip(grad_clip)


class Adam(Optimizer, torch.optim.Adam):
    """Adam; `weight_decay` is added to the gradient, as in Paddle."""

    steps_as = torch.optim.Adam

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        # For sparse gradients, which torch has another optimizer for.
        lazy_mode: bool = False,
        multi_precision: bool = False,
        use_multi_tensor: bool = False,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        words: dict[str, Any] = {
            "betas": (beta1, beta2),
            "eps": epsilon,
            "weight_decay": decay_of(weight_decay),
            "amsgrad": amsgrad,
        }
        super().__init__(
            parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words
        )
        self._equip(grad_clip, multi_precision=multi_precision)


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay."""

    steps_as = torch.optim.AdamW

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = 0.01,
        lr_ratio: Callable[[Any], float] | None = None,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        grad_clip: Any = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        if lr_ratio is not None or apply_decay_param_fun is not None:
            raise ValueError(
                "lr_ratio and apply_decay_param_fun go by Paddle's parameter names. Pass groups:"
                " parameters=[{'params': ..., 'weight_decay': 0.0}]."
            )
        words: dict[str, Any] = {
            "betas": (beta1, beta2),
            "eps": epsilon,
            "weight_decay": decay_of(weight_decay),
            "amsgrad": amsgrad,
        }
        super().__init__(
            parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words
        )
        self._equip(grad_clip, multi_precision=multi_precision)


class Lamb(Optimizer, mezzo.LAMB):
    """LAMB, whose steps are a fraction of each parameter's norm."""

    steps_as = mezzo.LAMB

    def __init__(
        self,
        learning_rate: float = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Callable[[Any], bool] | None = None,
        multi_precision: bool = False,
        # Mezzo's adapts where there are norms to adapt to.
        always_adapt: bool = False,
        name: str | None = None,
    ) -> None:
        given = parameters_of(parameters, learning_rate)
        if exclude_from_weight_decay_fn is not None:
            excluded = [one for one in given if exclude_from_weight_decay_fn(one)]
            rest = [one for one in given if not any(one is other for other in excluded)]
            given = [
                {"params": params, **words}
                for params, words in ((rest, {}), (excluded, {"weight_decay": 0.0}))
                if params
            ]
        super().__init__(
            given,
            lr=rate_of(learning_rate),
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=decay_of(lamb_weight_decay),
        )
        self._equip(grad_clip, multi_precision=multi_precision)


class Adamax(Optimizer, torch.optim.Adamax):
    """Adam by the largest gradient."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        words: dict[str, Any] = {
            "betas": (beta1, beta2),
            "eps": epsilon,
            "weight_decay": decay_of(weight_decay),
        }
        super().__init__(
            parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words
        )
        self._equip(grad_clip)


class SGD(Optimizer, torch.optim.SGD):
    """Plain gradient descent.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = SGD(learning_rate=0.5, parameters=[weight])
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> optimizer.clear_grad(set_to_zero=False)
    >>> weight.item(), weight.grad
    (0.5, None)
    """

    steps_as = torch.optim.SGD

    def __init__(
        self,
        learning_rate: float = 0.001,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        multi_precision: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            parameters_of(parameters, learning_rate),
            lr=rate_of(learning_rate),
            weight_decay=decay_of(weight_decay),
        )
        self._equip(grad_clip, multi_precision=multi_precision)


class Momentum(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum."""

    steps_as = torch.optim.SGD

    def __init__(
        self,
        learning_rate: float = 0.001,
        momentum: float = 0.9,
        parameters: Parameters = None,
        use_nesterov: bool = False,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        multi_precision: bool = False,
        rescale_grad: float = 1.0,
        use_multi_tensor: bool = False,
        name: str | None = None,
    ) -> None:
        if rescale_grad != 1.0:
            raise ValueError(
                f"rescale_grad={rescale_grad!r} is not carried out here. Scale the loss instead:"
                f" (loss * {rescale_grad!r}).backward()."
            )
        super().__init__(
            parameters_of(parameters, learning_rate),
            lr=rate_of(learning_rate),
            momentum=momentum,
            nesterov=use_nesterov,
            weight_decay=decay_of(weight_decay),
        )
        self._equip(grad_clip, multi_precision=multi_precision)


__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lamb",
    "Momentum",
    "Optimizer",
    "RMSProp",
]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    refuse("optimizer", name)
