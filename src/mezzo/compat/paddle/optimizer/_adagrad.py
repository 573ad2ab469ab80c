"""Optimizers of Paddle's that divide by the history of squared gradients."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat.paddle.optimizer._base import Decay, Optimizer, Parameters, decay_of, parameters_of, rate_of


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
        name: str | None = None,  # noqa: ARG002
        initial_accumulator_value: float = 0.0,
    ) -> None:
        words: dict[str, Any] = {"eps": epsilon, "weight_decay": decay_of(weight_decay), "initial_accumulator_value": initial_accumulator_value}
        super().__init__(parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words)
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
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__(parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), rho=rho, eps=epsilon, weight_decay=decay_of(weight_decay))
        self._equip(grad_clip)


class RMSProp(Optimizer, torch.optim.RMSprop):
    """RMSProp, as torch computes it: `epsilon` is added to the root, where Paddle adds it under the root."""

    def __init__(
        self,
        learning_rate: float,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,  # noqa: FBT001, FBT002 - Paddle's call shape
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Any = None,
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        words: dict[str, Any] = {"alpha": rho, "eps": epsilon, "momentum": momentum, "centered": centered, "weight_decay": decay_of(weight_decay)}
        super().__init__(parameters_of(parameters, learning_rate), lr=rate_of(learning_rate), **words)
        self._equip(grad_clip)
