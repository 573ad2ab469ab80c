"""A network that was trained in float32 on one kind of data and is tuned on another, by updates smaller than the 16-bit steps of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mezzo

Data = tuple[torch.Tensor, torch.Tensor]

SEEDS = (0, 1, 2)
"""Fixed: with fresh ones the three runs would at times lie closer together than rounding at
random makes two equal runs differ."""

WITH_MASTERS = [
    ("float16", "float32"),
    ("float16", "kahan"),
    ("float16", "stochastic"),
    ("bfloat16", "float32"),
    ("bfloat16", "split"),
    ("bfloat16", "kahan"),
    ("bfloat16", "stochastic"),
]


@dataclass(frozen=True, eq=False)
class Task:
    """What is learnt, and how."""

    make: Callable[[], nn.Module]
    first: Callable[[], Data]
    """What the network is trained on."""
    second: Callable[[], Data]
    """What it is tuned on."""
    unseen: Callable[[], Data]
    """More of the second kind, for the final loss."""
    batch: int
    steps: tuple[int, int]
    """Of training, of tuning."""
    rates: tuple[float, float] = (3e-3, 3e-5)
    """AdamW moves a weight by about the rate: the second is a quarter of float16's step for a
    weight of 0.1, and a thirtieth of bfloat16's."""


def float32_losses(task: Task) -> list[float]:
    """The final losses of three runs in float32, smallest first."""
    return sorted(_float32_loss(task, seed) for seed in SEEDS)


def tuned_loss(task: Task, dtype: str, master: str | None) -> float:
    """The final loss where tuning runs at O2, of the run that comes out in the middle in float32: nearer to its float32 twin than to the other two."""
    middle = sorted(SEEDS, key=lambda seed: _float32_loss(task, seed))[1]
    return _tuned(task, middle, dtype=dtype, master=master)


def losses_before_tuning(task: Task, data: Data) -> list[float]:
    """The losses of three float32 runs after the first stage, smallest first."""
    losses = []
    for seed in SEEDS:
        model = _seeded(task, seed)
        model.load_state_dict(_weights_before(task, seed))
        losses.append(_loss(model, data))
    return sorted(losses)


def loss_from_scratch(task: Task, seed: int, dtype: str, master: str | None) -> float:
    """The loss after the first stage where it runs at O2."""
    model = _seeded(task, seed)
    _train(task, model, task.first(), seed, stage=0, dtype=dtype, master=master)
    return _loss(model, task.first())


@cache
def _float32_loss(task: Task, seed: int) -> float:
    return _tuned(task, seed)


@cache
def _weights_before(task: Task, seed: int) -> dict[str, torch.Tensor]:
    model = _seeded(task, seed)
    _train(task, model, task.first(), seed, stage=0)
    return model.state_dict()


def _tuned(task: Task, seed: int, **words: Any) -> float:
    model = _seeded(task, seed)
    model.load_state_dict(_weights_before(task, seed))
    _train(task, model, task.second(), seed + len(SEEDS), stage=1, **words)
    return _loss(model, task.unseen())


def _seeded(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.make()


def _train(
    task: Task,
    model: nn.Module,
    data: Data,
    seed: int,
    *,
    stage: int,
    dtype: str | None = None,
    master: str | None = None,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rates[stage])
    if dtype is not None:
        mezzo.decorate(model, optimizer, "O2", dtype=dtype, master=master, seed=seed)
    scaler = mezzo.GradScaler("cpu", enabled=dtype == "float16")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(task.steps[stage]):
        chosen = torch.randint(len(data[0]), (task.batch,), generator=generator)
        optimizer.zero_grad()
        scaler.scale(_cross_entropy(model, data[0][chosen], data[1][chosen])).backward()
        scaler.step(optimizer)
        scaler.update()


@torch.no_grad()
def _loss(model: nn.Module, data: Data) -> float:
    model.eval()
    return _cross_entropy(model, *data).item()


def _cross_entropy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, -2), labels.flatten())
