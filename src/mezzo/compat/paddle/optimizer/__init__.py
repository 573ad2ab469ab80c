"""`paddle.optimizer`: Paddle's optimizers as subclasses of torch's and mezzo's.

Each takes Paddle's arguments and computes as the class it derives from; `_base.Optimizer` has the
methods that torch's optimizers lack. `steps_as` marks those that mezzo's fused step may replace.
`lazy_mode` (for sparse gradients), `use_multi_tensor` and `name` have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mezzo
from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.optimizer import lr
from mezzo.compat.paddle.optimizer._base import (
    Decay,
    LearningRate,
    Optimizer,
    Parameters,
    decay_by_name,
    parse_learning_rate,
    parse_parameters,
    parse_weight_decay,
)

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
    "lr",
]


class Adagrad(Optimizer, torch.optim.Adagrad):
    """`paddle.optimizer.Adagrad`."""

    steps_as = torch.optim.Adagrad

    def __init__(
        self,
        learning_rate: LearningRate,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        options: dict[str, Any] = {
            "eps": epsilon,
            "weight_decay": parse_weight_decay(weight_decay),
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            **options,
        )
        self._finish_init(learning_rate, grad_clip)


class Adadelta(Optimizer, torch.optim.Adadelta):
    """`paddle.optimizer.Adadelta`."""

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            rho=rho,
            eps=epsilon,
            weight_decay=parse_weight_decay(weight_decay),
        )
        self._finish_init(learning_rate, grad_clip)


class RMSProp(Optimizer, torch.optim.RMSprop):
    """`paddle.optimizer.RMSProp`, computed as in torch.

    `epsilon` is added to the square root; Paddle adds it under the root.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "alpha": rho,
            "eps": epsilon,
            "momentum": momentum,
            "centered": centered,
            "weight_decay": parse_weight_decay(weight_decay),
        }
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            **options,
        )
        self._finish_init(learning_rate, grad_clip)


class Adam(Optimizer, torch.optim.Adam):
    """`paddle.optimizer.Adam`; `weight_decay` is added to the gradient, as in Paddle."""

    steps_as = torch.optim.Adam

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        use_multi_tensor: bool = False,
        amsgrad: bool = False,
        name: str | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "betas": (beta1, beta2),
            "eps": epsilon,
            "weight_decay": parse_weight_decay(weight_decay),
            "amsgrad": amsgrad,
        }
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            **options,
        )
        self._finish_init(learning_rate, grad_clip, multi_precision=multi_precision)


class AdamW(Optimizer, torch.optim.AdamW):
    """`paddle.optimizer.AdamW`: Adam with decoupled weight decay.

    `apply_decay_param_fun` takes the name of a parameter, and `lr_ratio` the parameter itself.
    """

    steps_as = torch.optim.AdamW

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
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
        options: dict[str, Any] = {
            "betas": (beta1, beta2),
            "eps": epsilon,
            "weight_decay": parse_weight_decay(weight_decay),
            "amsgrad": amsgrad,
        }
        super().__init__(
            parse_parameters(
                parameters,
                learning_rate,
                decays=decay_by_name(apply_decay_param_fun),
                ratio=lr_ratio,
                decoupled=True,
            ),
            lr=parse_learning_rate(learning_rate),
            **options,
        )
        self._finish_init(learning_rate, grad_clip, multi_precision=multi_precision)


class Lamb(Optimizer, mezzo.LAMB):
    """`paddle.optimizer.Lamb`: LAMB, with a step size relative to each parameter's norm.

    `always_adapt` has no effect: `mezzo.LAMB` adapts wherever both norms are positive.
    """

    steps_as = mezzo.LAMB

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Callable[[Any], bool] | None = None,
        multi_precision: bool = False,
        always_adapt: bool = False,
        name: str | None = None,
    ) -> None:
        exclude = exclude_from_weight_decay_fn
        params = parse_parameters(
            parameters,
            learning_rate,
            decays=None if exclude is None else lambda parameter: not exclude(parameter),
            decoupled=True,
        )
        super().__init__(
            params,
            lr=parse_learning_rate(learning_rate),
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=parse_weight_decay(lamb_weight_decay),
        )
        self._finish_init(learning_rate, grad_clip, multi_precision=multi_precision)


class Adamax(Optimizer, torch.optim.Adamax):
    """`paddle.optimizer.Adamax`: Adam with the infinity norm."""

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "betas": (beta1, beta2),
            "eps": epsilon,
            "weight_decay": parse_weight_decay(weight_decay),
        }
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            **options,
        )
        self._finish_init(learning_rate, grad_clip)


class SGD(Optimizer, torch.optim.SGD):
    """`paddle.optimizer.SGD`: plain gradient descent.

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
        learning_rate: LearningRate = 0.001,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        multi_precision: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            weight_decay=parse_weight_decay(weight_decay),
        )
        self._finish_init(learning_rate, grad_clip, multi_precision=multi_precision)


class Momentum(Optimizer, torch.optim.SGD):
    """`paddle.optimizer.Momentum`: gradient descent with momentum.

    `rescale_grad` other than 1 raises: scale the loss instead.
    """

    steps_as = torch.optim.SGD

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
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
                f"rescale_grad={rescale_grad!r} is not supported. Scale the loss instead:"
                f" (loss * {rescale_grad!r}).backward()."
            )
        super().__init__(
            parse_parameters(parameters, learning_rate),
            lr=parse_learning_rate(learning_rate),
            momentum=momentum,
            nesterov=use_nesterov,
            weight_decay=parse_weight_decay(weight_decay),
        )
        self._finish_init(learning_rate, grad_clip, multi_precision=multi_precision)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.optim)
