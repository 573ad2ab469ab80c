"""Getters and setters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle

INF = float("inf")
SETTINGS = {
    "incr_ratio": 3.0,
    "decr_ratio": 0.25,
    "incr_every_n_steps": 7,
    "decr_every_n_nan_or_inf": 4,
    "init_loss_scaling": 12.0,
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("enable", [True, False], ids=["enabled", "disabled"])
def test_what_is_set_is_what_is_got(name, enable):
    scaler = paddle.amp.GradScaler(enable=enable)
    getattr(scaler, f"set_{name}")(SETTINGS[name])
    assert getattr(scaler, f"get_{name}")() == SETTINGS[name]


def run(scaler, *factors):
    weight = nn.Parameter(torch.ones(1))
    optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=[weight])
    for factor in factors:
        scaler.scale((weight * factor).sum()).backward()
        scaler.minimize(optimizer)
        optimizer.clear_grad()


def test_what_is_set_holds_for_the_next_step():
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    scaler.set_incr_every_n_steps(2)
    scaler.set_incr_ratio(3.0)
    run(scaler, 1.0, 1.0)
    assert scaler._scale.item() == 24.0
    scaler.set_decr_every_n_nan_or_inf(2)
    scaler.set_decr_ratio(0.25)
    run(scaler, INF)
    assert (scaler._scale.item(), scaler._decr_count) == (24.0, 1)
    run(scaler, INF)
    assert (scaler._scale.item(), scaler._decr_count) == (6.0, 0)


def test_setting_the_scale_keeps_the_counters():
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    run(scaler, 1.0, 1.0)
    scaler.set_init_loss_scaling(2.0)
    assert (scaler._scale.item(), scaler._incr_count) == (2.0, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("incr_ratio", 1.0, "The new_incr_ratio must be > 1.0"),
        ("decr_ratio", 2.0, "The new_decr_ratio must be < 1.0"),
    ],
)
def test_ratios_that_go_the_wrong_way_are_refused(name, value, message):
    with pytest.raises(AssertionError, match=message):
        getattr(paddle.amp.GradScaler(), f"set_{name}")(value)


def test_a_disabled_scaler_has_a_scale_of_one():
    scaler = paddle.amp.GradScaler(enable=False)
    assert (scaler._scale.item(), scaler._incr_count, scaler._decr_count, scaler._found_inf) == (
        1.0,
        0,
        0,
        False,
    )
