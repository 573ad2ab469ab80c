"""A bound optimizer over 16-bit parameters next to a plain one over the same weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernel_cases import fresh_seed
from support.patterns import same_bits
from torch import nn

from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.optimizers import LAMB, Lion

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
    "LAMB": lambda p: LAMB(p, lr=0.01),
}
SHAPES = [(4, 5), (7,), (), (0,), (2, 3, 2, 2)]

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Twins:
    """The same weights in 16 bits with a bound optimizer, and in float32 with a plain one."""

    def __init__(
        self, make: Make, master: str, half: torch.dtype = torch.bfloat16, **settings: Any
    ) -> None:
        self.seed, self.half = fresh_seed(), half
        self.generator = torch.Generator().manual_seed(self.seed)
        values = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        values[-1] = values[-1].to(memory_format=torch.channels_last)
        self.half_weights, self.full_weights = (
            [nn.Parameter(value.clone()) for value in values] for _ in range(2)
        )
        self.optimizer, self.plain = make(self.half_weights), make(self.full_weights)
        self.masters = MasterWeights(master, seed=3)
        for parameter in self.half_weights:
            self.masters.adopt(parameter, half)
        self.binding = OptimizerBinding(self.optimizer, self.masters, **settings)

    def set_gradients(self, *, without: int | None = None) -> None:
        """Set the same random gradients on both, each in its dtype."""
        for index, (half, whole) in enumerate(
            zip(self.half_weights, self.full_weights, strict=True)
        ):
            gradient = torch.randn(half.shape, generator=self.generator).to(self.half)
            half.grad = None if index == without else gradient.to(half.dtype, copy=True)
            whole.grad = None if index == without else gradient.float()

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain):
            optimizer.step()

    def are_equal(self) -> bool:
        return all(
            same_bits(self.masters.read(half), whole.detach())
            for half, whole in zip(self.half_weights, self.full_weights, strict=True)
        )
