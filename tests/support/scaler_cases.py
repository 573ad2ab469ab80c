"""A batch, a batch that overflows, and one training step with a loss scaler."""

from __future__ import annotations

import math

import torch
from torch import nn

from mezzo import GradScaler

X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])
INF = X * math.inf


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return model(x).square().mean()


def train(
    scaler: GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor = X
):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x)).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
