"""Optimizers whose parameters are 16-bit already."""

from __future__ import annotations

import pytest
import torch
from support.wrappers import Lookahead

import mezzo
from mezzo.optim.attach import bind_half_parameters
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.state_dict import MASTERS
from mezzo.policy.types import Master


def made(master: Master) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], lr=1e-4)
    bind_half_parameters(optimizer, master)
    return weight, optimizer


@pytest.mark.parametrize("master", [Master.FLOAT32, Master.NONE], ids=lambda master: master.value)
def test_a_gradient_whose_square_is_no_float16_is_stepped_from(master: Master) -> None:
    weight, optimizer = made(master)
    for _ in range(10):
        weight.grad = torch.full((2,), 1e-5, dtype=torch.float16)
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype is torch.float32
    # Steps of 1e-4 are too small for a float16 of 1 unless they add up beside it.
    assert weight[0].item() == (pytest.approx(0.999, abs=5e-4) if master is Master.FLOAT32 else 1.0)


def test_groups_that_are_added_later_are_stepped_too() -> None:
    _, optimizer = made(Master.NONE)
    other = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [other], "lr": 0.5})
    other.grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.step()
    assert (other.item(), optimizer.state[other]["exp_avg"].dtype) == (0.5, torch.float32)


def test_masters_are_saved_with_the_optimizer() -> None:
    assert made(Master.FLOAT32)[1].state_dict()[MASTERS].keys() == {0}
    assert MASTERS not in made(Master.NONE)[1].state_dict()


def test_a_state_that_is_there_from_the_start_becomes_float32_too() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.Adagrad([weight], lr=0.1)
    assert optimizer.state[weight]["sum"].dtype is torch.float16
    bind_half_parameters(optimizer)
    assert optimizer.state[weight]["sum"].dtype is torch.float32


def test_an_optimizer_that_steps_another_one_is_refused_before_anything_changes() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = Lookahead(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(
        mezzo.UnsupportedError, match=r"Lookahead steps another optimizer, \.optimizer \(SGD\)"
    ):
        bind_half_parameters(optimizer)
    assert optimizer_binding(optimizer) is None
    assert "step" not in vars(optimizer)
