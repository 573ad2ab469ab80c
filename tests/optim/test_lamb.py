"""LAMB against a plain loop in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.kernel_cases import fresh_seed
from torch import nn

from mezzo.optim.optimizers import LAMB

SHAPES = [(3, 4), (5,), (), (0,), (2, 3, 2, 2)]


def stepped(
    value: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
    count: int,
    settings: dict[str, Any],
) -> torch.Tensor:
    """The definition, in float64; the moments are updated in place."""
    (beta1, beta2), (moment, square) = settings["betas"], moments
    moment.copy_(beta1 * moment + (1 - beta1) * gradient)
    square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
    direction = (moment / (1 - beta1**count)) / (
        (square / (1 - beta2**count)).sqrt() + settings["eps"]
    ) + settings["weight_decay"] * value
    weight, length = (
        math.sqrt(float((value * value).sum())),
        math.sqrt(float((direction * direction).sum())),
    )
    trust = 1.0 if weight == 0.0 or length == 0.0 else weight / length
    return value - settings["lr"] * trust * direction


def reference(
    values: list[torch.Tensor], gradients: list[list[torch.Tensor]], settings: dict[str, Any]
) -> list[torch.Tensor]:
    finished = []
    for place, start in enumerate(values):
        value = start.double()
        moments = torch.zeros_like(value), torch.zeros_like(value)
        for count, step in enumerate(gradients, start=1):
            value = stepped(value, moments, step[place].double(), count, settings)
        finished.append(value)
    return finished


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.9)])
def test_ten_steps_are_those_of_the_definition(
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
    for got, wanted in zip(parameters, reference(values, gradients, settings), strict=True):
        assert (
            float((got.detach().double() - wanted).abs().max() if got.numel() else 0.0) <= tolerance
        ), seed


def test_a_step_is_the_rate_times_the_norm_of_the_weights():
    torch.manual_seed(seed := fresh_seed())
    for size in (1e-4, 1.0, 1e4):
        parameter = nn.Parameter(torch.randn(50) * size)
        before = parameter.detach().clone()
        parameter.grad = torch.randn(50)
        LAMB([parameter], lr=0.125).step()
        assert (parameter - before).norm().item() == pytest.approx(
            0.125 * before.norm().item(), rel=1e-5
        ), seed


def test_weights_of_zero_are_stepped_as_adam_would():
    parameter, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    parameter.grad = other.grad = torch.tensor([1.0, -2.0, 3.0])
    LAMB([parameter], lr=0.1, eps=1e-8, weight_decay=0.0).step()
    torch.optim.Adam([other], lr=0.1).step()
    torch.testing.assert_close(parameter, other)


def test_gradients_of_zero_leave_the_weights_as_they_are_without_decay():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    LAMB([parameter], lr=0.1, weight_decay=0.0).step()
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_parameters_that_joined_later_have_step_counts_of_their_own():
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


def test_its_state_is_named_and_placed_as_adams():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    ours, adams = LAMB([parameter]), torch.optim.Adam([parameter])
    for optimizer in (ours, adams):
        optimizer.step()
    kinds = [
        {
            name: (value.dtype, value.shape, value.device)
            for name, value in optimizer.state[parameter].items()
        }
        for optimizer in (ours, adams)
    ]
    assert kinds[0] == kinds[1]
    assert ours.defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "maximize": False,
    }


def test_a_step_count_that_was_saved_as_a_number_is_read():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = LAMB([parameter])
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = 1
    optimizer.load_state_dict(state)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["step"], torch.tensor(2.0))


def test_an_eps_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"LAMB got eps=-1\.0: it must be at least 0"):
        LAMB([nn.Parameter(torch.ones(1))], eps=-1.0)


def test_a_variant_may_say_how_long_its_steps_are_and_what_corrects_its_moments():
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
