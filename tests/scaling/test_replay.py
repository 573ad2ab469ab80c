"""What a captured step asks of a scaler, as far as a CPU can show it."""

from __future__ import annotations

import torch

from mezzo.scaling import replay
from mezzo.scaling.scaler import GradScaler


def test_scalers_that_cannot_be_captured_say_why():
    assert replay.refusal(GradScaler("cpu")) is None
    assert "3 scales" in replay.refusal(GradScaler("cpu", losses=3))
    assert "other processes" in replay.refusal(GradScaler("cpu", reduce_flag=lambda flag: flag))


def test_a_scale_on_a_cpu_is_never_captured():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert not replay.is_warm(scaler)
    assert replay.shown(scaler) is None
    assert replay.state(scaler).scale == 2.0**16


def test_a_step_that_did_not_happen_is_forgotten():
    scaler, parameter = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    replay.forget(scaler)
    scaler.step(optimizer)
    assert replay.tables(scaler) == replay.before(scaler) == ()
