"""Train a network in float32 on one kind of data, then tune it on another kind.

The updates of the tuning are smaller than the spacing of the 16-bit numbers around its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo

Data = tuple[torch.Tensor, torch.Tensor]

SEEDS = (0, 1, 2)
"""Fixed: with random seeds the spread of three runs would at times be smaller than the difference
that stochastic rounding makes between two equal runs."""

_WITH_MASTERS = [
    ("float16", "float32"),
    ("float16", "kahan"),
    ("float16", "stochastic"),
    ("bfloat16", "float32"),
    ("bfloat16", "split"),
    ("bfloat16", "kahan"),
    ("bfloat16", "stochastic"),
]


def with_masters(first: int) -> list[Any]:
    """Return all pairs of dtype and master format, every second one marked exhaustive.

    Two tasks with `first` 0 and 1 cover all pairs between them.
    """
    return _every_second(_WITH_MASTERS, first)


def without_masters(first: int) -> list[Any]:
    """Return both dtypes, one of them marked exhaustive; two tasks cover both between them."""
    return _every_second([("float16",), ("bfloat16",)], first)


def _every_second(cases: Sequence[tuple[str, ...]], first: int) -> list[Any]:
    return [
        pytest.param(*case, marks=[] if place % 2 == first else pytest.mark.exhaustive)
        for place, case in enumerate(cases)
    ]


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its data and hyperparameters."""

    make: Callable[[], nn.Module]
    first: Callable[[], Data]
    """Data of the training."""
    second: Callable[[], Data]
    """Data of the tuning."""
    unseen: Callable[[], Data]
    """More data like those of the tuning, for the final loss."""
    batch: int
    steps: tuple[int, int]
    """Number of steps of training and of tuning."""
    rates: tuple[float, float] = (3e-3, 3e-5)
    """Learning rates of training and of tuning.

    AdamW changes a weight by about the rate: the second is a quarter of the spacing of float16
    around 0.1, and a thirtieth of that of bfloat16.
    """


def float32_losses(task: Task) -> list[float]:
    """Return the final losses of three runs in float32, smallest first."""
    return sorted(_float32_loss(task, seed) for seed in SEEDS)


def tuned_loss(task: Task, dtype: str, master: str | None) -> float:
    """Return the final loss of a run that is tuned at O2.

    With the seed whose float32 run has the middle loss, so that the loss is nearer to that of this
    run than to the other two.
    """
    middle = sorted(SEEDS, key=lambda seed: _float32_loss(task, seed))[1]
    return _tuned(task, middle, dtype=dtype, master=master)


def losses_before_tuning(task: Task, data: Data) -> list[float]:
    """Return the losses of three float32 runs after the training, smallest first."""
    losses = []
    for seed in SEEDS:
        model = _seeded(task, seed)
        model.load_state_dict(_weights_before(task, seed))
        losses.append(_loss(model, data))
    return sorted(losses)


def loss_from_scratch(task: Task, seed: int, dtype: str, master: str | None) -> float:
    """Return the loss after a training at O2."""
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


def _tuned(task: Task, seed: int, **options: Any) -> float:
    model = _seeded(task, seed)
    model.load_state_dict(_weights_before(task, seed))
    _train(task, model, task.second(), seed + len(SEEDS), stage=1, **options)
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
