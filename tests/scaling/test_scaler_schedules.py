"""Schedulers that a scaler steps: on the device, or on the host if that has to be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import mezzo
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.master_weights import MasterWeights
from mezzo.scaling.scaler_schedules import _is_deferred

X = torch.tensor([[1.0, -2.0, 0.5]])
INF = X * math.inf


def test_a_schedule_on_the_device_advances_with_successful_steps_only(net, far_cpu):
    scaler, optimizer = mezzo.GradScaler(), torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    rates = []
    optimizer.register_step_pre_hook(
        lambda stepped, *_: rates.append(float(stepped.param_groups[0]["lr"]))
    )
    for x in (X, INF, X, X):
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(optimizer, scheduler=scheduler)
        scaler.update()
    assert rates == pytest.approx([0.1, 0.05, 0.05, 0.025])
    scaler.state()
    assert scheduler.get_last_lr() == [pytest.approx(0.0125)]
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize(
    ("make_scheduler", "device_values", "deferred"),
    [
        (lambda optimizer: ExponentialLR(optimizer, gamma=0.5), {"lr"}, True),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9), {"lr"}, False),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9), {"lr", "betas"}, True),
        (lambda optimizer: ExponentialLR(optimizer, gamma=0.5), set(), False),
    ],
    ids=["rate", "betas on the host", "betas on the device", "rate on the host"],
)
def test_a_schedule_runs_on_the_device_if_the_bound_step_reads_all_its_values_there(
    make_scheduler, device_values, deferred, monkeypatch
):
    optimizer = torch.optim.NAdam([nn.Parameter(torch.ones(1))], lr=0.1)
    binding = bind_optimizer(optimizer, MasterWeights("none"))
    monkeypatch.setattr(binding, "device_values", frozenset(device_values))
    scheduler = make_scheduler(optimizer)
    assert _is_deferred(optimizer, scheduler, torch.device("cuda")) == deferred
    assert not _is_deferred(optimizer, scheduler, torch.device("cpu"))
