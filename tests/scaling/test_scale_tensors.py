"""The scale on a device does what the value does, and hears whoever writes to its tensors."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scale_rules import RULES

from mezzo import ScalerError, ScaleRule, ScaleState, _launch
from mezzo.scaling.scale_state import next_state
from mezzo.scaling.scale_tensors import DeviceLossScale, HostLossScale, loss_scale_on

CPU = torch.device("cpu")


def flag(is_bad: bool) -> torch.Tensor:
    return torch.tensor(float(is_bad))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_every_transition_is_that_of_the_value(rule: ScaleRule, kind: str):
    steps = random.Random(0)
    state = ScaleState(rule.clamp(2.0**10))
    scale = HostLossScale(state) if kind == "host" else DeviceLossScale(state, CPU)
    for step in range(400):
        is_bad = steps.random() < (0.7 if step // 50 % 2 else 0.1)
        scale.advance(flag(is_bad), rule)
        state = next_state(state, rule, found_nonfinite=is_bad)
        assert scale.read() == state, step
        assert (scale.scale.item(), scale.growth_tracker.item()) == (
            state.scale,
            state.growth_tracker,
        )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.booleans(), min_size=50, max_size=50),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
)
def test_random_steps_on_a_device_agree_with_the_value(
    steps: list[bool], interval: int, backoff_interval: int, consecutive: bool
):
    rule = ScaleRule(
        growth_interval=interval,
        backoff_interval=backoff_interval,
        consecutive_backoff=consecutive,
        min_scale=2.0**-3,
        max_scale=2.0**9,
    )
    state = ScaleState(1.0)
    scale = DeviceLossScale(state, CPU)
    for is_bad in steps:
        scale.advance(flag(is_bad), rule)
        state = next_state(state, rule, found_nonfinite=is_bad)
    assert scale.read() == state


@pytest.mark.parametrize(
    "kind", [HostLossScale, lambda state: DeviceLossScale(state, CPU)], ids=["host", "device"]
)
def test_a_shortened_interval_that_the_tracker_is_past_is_still_met(kind):
    scale = kind(ScaleState(8.0, growth_tracker=5))
    scale.advance(flag(False), ScaleRule(growth_interval=3))
    assert scale.read().scale == 16.0


@pytest.mark.parametrize(
    "kind", [HostLossScale, lambda state: DeviceLossScale(state, CPU)], ids=["host", "device"]
)
def test_a_scale_set_by_hand_stays_within_its_bounds(kind):
    scale, rule = kind(ScaleState(8.0)), ScaleRule(min_scale=1.0, max_scale=64.0)
    for given_scale, kept in [
        (32.0, 32.0),
        (1e9, 64.0),
        (1e-9, 1.0),
        (torch.tensor([2.0]), 2.0),
        (torch.tensor(1e30), 64.0),
    ]:
        scale.set(given_scale, rule)
        assert scale.read().scale == kept
    for refused in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ScalerError, match="positive finite"):
            scale.set(refused, rule)
    assert scale.read().scale == 64.0


def test_a_nan_in_a_tensor_that_nobody_may_read_becomes_the_floor():
    scale = DeviceLossScale(ScaleState(8.0), CPU)
    scale.set(torch.tensor(float("nan")), ScaleRule(min_scale=0.5))
    assert scale.read().scale == 0.5


@pytest.mark.parametrize(
    "kind", [HostLossScale, lambda state: DeviceLossScale(state, CPU)], ids=["host", "device"]
)
def test_loading_fills_the_tensors_that_others_hold(kind):
    scale = kind(ScaleState(8.0))
    held, tracker = scale.scale, scale.growth_tracker
    scale.load(ScaleState(2.0, 3, 1, 10, 4, 1))
    assert (held.item(), tracker.item()) == (2.0, 3)
    assert scale.scale is held
    assert scale.read() == ScaleState(2.0, 3, 1, 10, 4, 1)


def test_whoever_writes_to_the_tensors_is_heard():
    scale = HostLossScale(ScaleState(8.0))
    scale.scale.fill_(4.0)
    scale.growth_tracker.fill_(1)
    scale.advance(flag(False), ScaleRule(growth_interval=2))
    assert scale.read().scale == 8.0
    assert scale.inverse().item() == 0.125
    scale.scale.fill_(16.0)
    assert scale.inverse().item() == 0.0625


@pytest.mark.parametrize("value", [3.0, 65536.0, 1e-7, 0.1])
def test_the_inverse_is_rounded_once_from_float64(value: float):
    exact = torch.tensor(value, dtype=torch.float32)
    wanted = (1.0 / exact.double()).float()
    for scale in (
        HostLossScale(ScaleState(exact.item())),
        DeviceLossScale(ScaleState(exact.item()), CPU),
    ):
        assert torch.equal(scale.inverse(), wanted)


def test_a_cpu_keeps_the_value_and_a_device_that_makes_the_host_wait_keeps_tensors(
    monkeypatch: pytest.MonkeyPatch,
):
    assert isinstance(loss_scale_on(CPU, ScaleState()), HostLossScale)
    monkeypatch.setattr(_launch, "needs_sync", lambda _: True)
    assert isinstance(loss_scale_on(CPU, ScaleState()), DeviceLossScale)


def test_quiet_good_steps_are_counted_and_a_loaded_state_forgets_them():
    scale, rule = HostLossScale(ScaleState(8.0, growth_tracker=1)), ScaleRule(growth_interval=5)
    for _ in range(3):
        scale.advance(flag(False), rule)
    assert scale.read() == ScaleState(8.0, growth_tracker=4, good_steps=3)
    scale.advance(flag(False), rule)
    assert scale.read() == ScaleState(16.0, growth_tracker=0, good_steps=4)
    for _ in range(2):
        scale.advance(flag(False), rule)
    scale.load(ScaleState(4.0))
    assert scale.read() == ScaleState(4.0)


def test_a_scale_written_between_quiet_steps_is_heard():
    scale, rule = HostLossScale(ScaleState(8.0)), ScaleRule()
    scale.advance(flag(False), rule)
    scale.scale.fill_(2.0)
    scale.advance(flag(False), rule)
    assert scale.read() == ScaleState(2.0, growth_tracker=2, good_steps=2)
    scale.growth_tracker.fill_(7)
    scale.advance(flag(False), rule)
    assert scale.read() == ScaleState(2.0, growth_tracker=8, good_steps=3)
