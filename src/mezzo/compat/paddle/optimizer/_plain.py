"""Optimizers of Paddle's whose rates do not adapt."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat.paddle.optimizer._base import Decay, Optimizer, Parameters, decay_of, parameters_of, rate_of


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
        multi_precision: bool = False,  # noqa: FBT001, FBT002 - Paddle's call shape
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__(parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), weight_decay=decay_of(weight_decay))
        self._equip(grad_clip, multi_precision=multi_precision)


class Momentum(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum."""

    steps_as = torch.optim.SGD

    def __init__(
        self,
        learning_rate: float = 0.001,
        momentum: float = 0.9,
        parameters: Parameters = None,
        use_nesterov: bool = False,  # noqa: FBT001, FBT002 - Paddle's call shape
        weight_decay: Decay = None,
        grad_clip: Any = None,
        multi_precision: bool = False,  # noqa: FBT001, FBT002
        rescale_grad: float = 1.0,
        use_multi_tensor: bool = False,  # noqa: FBT001, FBT002, ARG002 - torch always does
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        if rescale_grad != 1.0:
            raise ValueError(f"rescale_grad={rescale_grad!r} is not carried out here. Scale the loss instead: (loss * {rescale_grad!r}).backward().")
        super().__init__(
            parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), momentum=momentum, nesterov=use_nesterov, weight_decay=decay_of(weight_decay)
        )
        self._equip(grad_clip, multi_precision=multi_precision)
