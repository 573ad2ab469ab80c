"""Lion against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import fresh_seed
from torch import nn

from mezzo.optim.optimizers import Lion

SHAPES = [(3, 4), (5,), (), (0,), (2, 3, 2, 2)]


def reference(
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> list[torch.Tensor]:
    """The definition, in float64, one parameter after the other."""
    finished = []
    for place, start in enumerate(values):
        value, moment = start.double(), torch.zeros_like(start, dtype=torch.float64)
        for step in gradients:
            gradient = step[place].double()
            value = value * (1 - lr * decay)
            value = value - lr * torch.sign(betas[0] * moment + (1 - betas[0]) * gradient)
            moment = betas[1] * moment + (1 - betas[1]) * gradient
        finished.append(value)
    return finished


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.5), (0.95, 0.0)])
def test_ten_steps_are_those_of_the_definition(
    dtype: torch.dtype, tolerance: float, decay: float, betas: tuple[float, float]
):
    torch.manual_seed(seed := fresh_seed())
    values = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    gradients = [[torch.randn(shape, dtype=dtype) for shape in SHAPES] for _ in range(10)]
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = Lion(parameters, lr=0.01, betas=betas, weight_decay=decay)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for got, wanted in zip(
        parameters, reference(values, gradients, 0.01, betas, decay), strict=True
    ):
        assert (
            float((got.detach().double() - wanted).abs().max() if got.numel() else 0.0) <= tolerance
        ), seed


def test_the_first_step_is_as_long_as_the_rate_whatever_the_gradient():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1e-30, -1e30, 0.0, -1.0])
    Lion([parameter], lr=0.5).step()
    assert parameter.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_the_gradient_enters_the_moment_after_the_step():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Lion([parameter], lr=1.0, betas=(0.5, 0.75))
    parameter.grad = torch.tensor([1.0])
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].item() == 0.25
    # 0.5 × 0.25 outweighs 0.5 × 0.2 of the other sign.
    parameter.grad = torch.tensor([-0.2])
    optimizer.step()
    assert parameter.item() == -2.0


def test_its_state_is_one_moment():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = Lion([parameter])
    optimizer.step()
    assert set(optimizer.state[parameter]) == {"exp_avg"}
    assert optimizer.defaults == {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
    }
