"""What a captured step needs of a scaler, as far as a CPU can test it."""

from __future__ import annotations

import torch

from mezzo.scaling import captured_scaler
from mezzo.scaling.scaler import GradScaler


def test_scalers_that_cannot_be_captured_give_the_reason():
    assert captured_scaler.capture_refusal(GradScaler("cpu")) is None
    assert "3 scales" in captured_scaler.capture_refusal(GradScaler("cpu", num_losses=3))
    assert "other processes" in captured_scaler.capture_refusal(
        GradScaler("cpu", reduce_found_inf=lambda flag: flag)
    )


def test_a_scale_on_a_cpu_has_no_device_counters():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert not captured_scaler.is_warmed_up(scaler)
    assert captured_scaler.device_counters(scaler) is None
    assert captured_scaler.host_counters(scaler) == (2.0**16, 0, 0)


def test_the_records_of_a_step_that_did_not_happen_are_discarded():
    scaler, parameter = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    captured_scaler.discard_records(scaler)
    scaler.step(optimizer)
    assert captured_scaler.schedule_tables(scaler) == captured_scaler.before_replay(scaler) == ()
