"""Private names of torch's scaler that its tests and optimizers use."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mezzo

CPU = torch.device("cpu")


def parameter_with(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def test_scale_and_tracker_are_created_with_the_first_loss_as_in_torch():
    scaler = mezzo.GradScaler(init_scale=3.0)
    assert scaler._scale is scaler._growth_tracker is scaler._get_scale_async() is None
    scaler._lazy_init_scale_growth_tracker(CPU)
    assert (scaler._scale.item(), scaler._scale.dtype, scaler._scale.shape) == (
        3.0,
        torch.float32,
        (),
    )
    assert (scaler._growth_tracker.item(), scaler._growth_tracker.dtype) == (0, torch.int32)
    assert scaler._init_scale == 3.0


def test_counting_starts_from_a_growth_tracker_that_was_set():
    scaler = mezzo.GradScaler(growth_interval=10)
    scaler._init_growth_tracker = 7
    scaler.scale(torch.ones(1))
    assert scaler._growth_tracker.item() == scaler._get_growth_tracker() == 7
    scaler.load_state_dict(mezzo.GradScaler().state_dict())
    assert scaler._init_growth_tracker == scaler._growth_tracker.item() == 0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_unscale_grads_takes_torchs_arguments(shape: tuple[int, ...]):
    gradients = [
        torch.full((3,), 4.0),
        torch.full((3,), 4.0, dtype=torch.float16),
        torch.full((4, 4), 4.0)[:, :2],
    ]
    optimizer = torch.optim.SGD([parameter_with(gradient) for gradient in gradients], lr=0.1)
    found = torch.zeros(shape)
    flags = mezzo.GradScaler()._unscale_grads_(optimizer, torch.full(shape, 0.25), found, True)
    assert flags[CPU] is found
    assert found.item() == 0
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients)
    gradients[1][0] = math.inf
    assert (
        mezzo.GradScaler()
        ._unscale_grads_(optimizer, torch.full(shape, 0.25), found, True)[CPU]
        .item()
        == 1
    )


def test_check_inf_per_device_records_flags_and_does_not_unscale():
    optimizer = torch.optim.SGD([parameter_with(torch.tensor([4.0, math.nan]))], lr=0.1)
    scaler = mezzo.GradScaler()
    scaler.scale(torch.ones(1))
    assert scaler._check_inf_per_device(optimizer)[CPU].item() == 1
    assert scaler._found_inf_per_device(optimizer)[CPU].item() == 1
    assert optimizer.param_groups[0]["params"][0].grad[0].item() == 4.0
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_private_attributes_can_be_set_before_and_after_the_first_loss():
    scaler = mezzo.GradScaler(num_losses=2)
    scaler._init_scale, scaler._init_growth_tracker = 8.0, 3
    assert [state.scale for state in (scaler.state(0), scaler.state(1))] == [8.0, 2.0**16]
    scaler._scale, scaler._growth_tracker = torch.tensor(4.0), torch.tensor(5, dtype=torch.int32)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 5)


def test_private_attributes_of_the_rule_agree_with_its_accessors():
    scaler = mezzo.GradScaler()
    scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = 4.0, 0.25, 7
    assert (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (4.0, 0.25, 7)
    scaler.set_growth_interval(9)
    assert scaler._growth_interval == 9
