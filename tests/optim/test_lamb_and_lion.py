"""LAMB and Lion against their definitions in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.kernel_cases import fresh_seed
from torch import nn

from mezzo.optim.optimizers import LAMB, Lion

SHAPES = [(3, 4), (5,), (), (0,), (2, 3, 2, 2)]


def lamb_step(
    value: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
    count: int,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Return the updated weight by definition; the moments are updated in index."""
    (beta1, beta2), (moment, square) = settings["betas"], moments
    moment.copy_(beta1 * moment + (1 - beta1) * gradient)
    square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
    direction = (moment / (1 - beta1**count)) / (
        (square / (1 - beta2**count)).sqrt() + settings["eps"]
    ) + settings["weight_decay"] * value
    weight_norm, direction_norm = (
        math.sqrt(float((value * value).sum())),
        math.sqrt(float((direction * direction).sum())),
    )
    is_zero = weight_norm == 0.0 or direction_norm == 0.0
    trust = 1.0 if is_zero else weight_norm / direction_norm
    return value - settings["lr"] * trust * direction


def lamb_reference(
    values: list[torch.Tensor], gradients: list[list[torch.Tensor]], settings: dict[str, Any]
) -> list[torch.Tensor]:
    finished = []
    for index, start in enumerate(values):
        value = start.double()
        moments = torch.zeros_like(value), torch.zeros_like(value)
        for count, step in enumerate(gradients, start=1):
            value = lamb_step(value, moments, step[index].double(), count, settings)
        finished.append(value)
    return finished


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.9)])
def test_ten_steps_of_lamb_follow_the_definition(
    dtype: torch.dtype, tolerance: float, decay: float, betas: tuple[float, float]
):
    torch.manual_seed(seed := fresh_seed())
    values = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    gradients = [[torch.randn(shape, dtype=dtype) for shape in SHAPES] for _ in range(10)]
    settings = {"lr": 0.02, "betas": betas, "eps": 1e-6, "weight_decay": decay}
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = LAMB(parameters, **settings)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for got, wanted in zip(parameters, lamb_reference(values, gradients, settings), strict=True):
        assert (
            float((got.detach().double() - wanted).abs().max() if got.numel() else 0.0) <= tolerance
        ), seed


def test_lamb_moves_weights_by_the_learning_rate_times_their_norm():
    torch.manual_seed(seed := fresh_seed())
    for size in (1e-4, 1.0, 1e4):
        parameter = nn.Parameter(torch.randn(50) * size)
        before = parameter.detach().clone()
        parameter.grad = torch.randn(50)
        LAMB([parameter], lr=0.125).step()
        assert (parameter - before).norm().item() == pytest.approx(
            0.125 * before.norm().item(), rel=1e-5
        ), seed


def test_lamb_updates_zero_weights_as_adam():
    parameter, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    parameter.grad = other.grad = torch.tensor([1.0, -2.0, 3.0])
    LAMB([parameter], lr=0.1, eps=1e-8, weight_decay=0.0).step()
    torch.optim.Adam([other], lr=0.1).step()
    torch.testing.assert_close(parameter, other)


def test_lamb_without_decay_keeps_weights_with_zero_gradients():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    LAMB([parameter], lr=0.1, weight_decay=0.0).step()
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_lamb_counts_the_steps_of_each_parameter():
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = LAMB([early, late], lr=0.1)
    early.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    late.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    alone = nn.Parameter(torch.ones(2))
    alone.grad = torch.tensor([1.0, 2.0])
    LAMB([alone], lr=0.1).step()
    assert torch.equal(late, alone)
    assert [optimizer.state[parameter]["step"].item() for parameter in (early, late)] == [2.0, 1.0]


def test_the_state_of_lamb_has_the_names_and_devices_of_adams():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    ours, adams = LAMB([parameter]), torch.optim.Adam([parameter])
    for optimizer in (ours, adams):
        optimizer.step()
    layouts = [
        {
            name: (value.dtype, value.shape, value.device)
            for name, value in optimizer.state[parameter].items()
        }
        for optimizer in (ours, adams)
    ]
    assert layouts[0] == layouts[1]
    assert ours.defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "maximize": False,
    }


def test_lamb_loads_a_step_count_saved_as_a_number():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = LAMB([parameter])
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = 1
    optimizer.load_state_dict(state)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["step"], torch.tensor(2.0))


def test_lamb_refuses_a_negative_eps():
    with pytest.raises(ValueError, match=r"LAMB got eps=-1\.0: it must be at least 0"):
        LAMB([nn.Parameter(torch.ones(1))], eps=-1.0)


def test_a_subclass_of_lamb_may_override_trust_ratios_and_corrections():
    class Plain(LAMB):
        def _corrections(self, group, steps):
            return [1.0] * len(steps), [1.0] * len(steps)

        def _ratios(self, group, parameters, directions):
            return torch.ones(len(parameters))

    weight = torch.nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.tensor([1.0])
    Plain([weight], lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0).step()
    # Moments 0.1 and 0.01: a direction of 0.1 / sqrt(0.01).
    torch.testing.assert_close(weight.data, torch.tensor([1.9]))


# -- Lion ------------------------------------------------------------------------------------------


def lion_reference(
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> list[torch.Tensor]:
    finished = []
    for index, start in enumerate(values):
        value, moment = start.double(), torch.zeros_like(start, dtype=torch.float64)
        for step in gradients:
            gradient = step[index].double()
            value = value * (1 - lr * decay)
            value = value - lr * torch.sign(betas[0] * moment + (1 - betas[0]) * gradient)
            moment = betas[1] * moment + (1 - betas[1]) * gradient
        finished.append(value)
    return finished


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.5), (0.95, 0.0)])
def test_ten_steps_of_lion_follow_the_definition(
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
        parameters, lion_reference(values, gradients, 0.01, betas, decay), strict=True
    ):
        assert (
            float((got.detach().double() - wanted).abs().max() if got.numel() else 0.0) <= tolerance
        ), seed


def test_lion_moves_weights_by_the_learning_rate():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1e-30, -1e30, 0.0, -1.0])
    Lion([parameter], lr=0.5).step()
    assert parameter.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_lion_updates_the_moment_after_the_weights():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Lion([parameter], lr=1.0, betas=(0.5, 0.75))
    parameter.grad = torch.tensor([1.0])
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].item() == 0.25
    # 0.5 × 0.25 outweighs 0.5 × 0.2 of the other sign.
    parameter.grad = torch.tensor([-0.2])
    optimizer.step()
    assert parameter.item() == -2.0


def test_the_state_of_lion_is_one_moment():
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
