"""The loss scale on a device and on the host makes the transitions of `next_state`."""

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

both_kinds = pytest.mark.parametrize(
    "kind", [HostLossScale, lambda state: DeviceLossScale(state, CPU)], ids=["host", "device"]
)


def flag(is_nonfinite: bool) -> torch.Tensor:
    return torch.tensor(float(is_nonfinite))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_every_transition_is_that_of_next_state(rule: ScaleRule, kind: str):
    steps = random.Random(0)
    state = ScaleState(rule.clamp(2.0**10))
    scale = HostLossScale(state) if kind == "host" else DeviceLossScale(state, CPU)
    for step in range(400):
        is_nonfinite = steps.random() < (0.7 if step // 50 % 2 else 0.1)
        scale.advance(flag(is_nonfinite), rule)
        state = next_state(state, rule, found_nonfinite=is_nonfinite)
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
def test_random_steps_on_a_device_agree_with_next_state(
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
    for is_nonfinite in steps:
        scale.advance(flag(is_nonfinite), rule)
        state = next_state(state, rule, found_nonfinite=is_nonfinite)
    assert scale.read() == state


@both_kinds
def test_the_scale_grows_if_the_tracker_is_past_a_shortened_interval(kind):
    scale = kind(ScaleState(8.0, growth_tracker=5))
    scale.advance(flag(False), ScaleRule(growth_interval=3))
    assert scale.read().scale == 16.0


@both_kinds
def test_a_new_scale_is_clamped_and_an_invalid_one_raises(kind):
    scale, rule = kind(ScaleState(8.0)), ScaleRule(min_scale=1.0, max_scale=64.0)
    for new_scale, expected in [
        (32.0, 32.0),
        (1e9, 64.0),
        (1e-9, 1.0),
        (torch.tensor([2.0]), 2.0),
        (torch.tensor(1e30), 64.0),
    ]:
        scale.set(new_scale, rule)
        assert scale.read().scale == expected
    for invalid in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ScalerError, match="positive finite"):
            scale.set(invalid, rule)
    assert scale.read().scale == 64.0


def test_nan_in_a_tensor_that_is_not_read_becomes_the_floor():
    scale = DeviceLossScale(ScaleState(8.0), CPU)
    scale.set(torch.tensor(float("nan")), ScaleRule(min_scale=0.5))
    assert scale.read().scale == 0.5


@both_kinds
def test_loading_writes_to_the_same_tensors(kind):
    scale = kind(ScaleState(8.0))
    tensor, tracker = scale.scale, scale.growth_tracker
    scale.load(ScaleState(2.0, 3, 1, 10, 4, 1))
    assert (tensor.item(), tracker.item()) == (2.0, 3)
    assert scale.scale is tensor
    assert scale.read() == ScaleState(2.0, 3, 1, 10, 4, 1)


def test_values_that_users_write_to_the_tensors_count():
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
    expected = (1.0 / exact.double()).float()
    for scale in (
        HostLossScale(ScaleState(exact.item())),
        DeviceLossScale(ScaleState(exact.item()), CPU),
    ):
        assert torch.equal(scale.inverse(), expected)


def test_a_scale_on_a_cpu_is_a_value_and_on_other_devices_tensors(
    monkeypatch: pytest.MonkeyPatch,
):
    assert isinstance(loss_scale_on(CPU, ScaleState()), HostLossScale)
    monkeypatch.setattr(_launch, "needs_sync", lambda _: True)
    assert isinstance(loss_scale_on(CPU, ScaleState()), DeviceLossScale)


def test_successful_steps_are_counted_and_loading_resets_the_counts():
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


def test_values_written_between_successful_steps_count():
    scale, rule = HostLossScale(ScaleState(8.0)), ScaleRule()
    scale.advance(flag(False), rule)
    scale.scale.fill_(2.0)
    scale.advance(flag(False), rule)
    assert scale.read() == ScaleState(2.0, growth_tracker=2, good_steps=2)
    scale.growth_tracker.fill_(7)
    scale.advance(flag(False), rule)
    assert scale.read() == ScaleState(2.0, growth_tracker=8, good_steps=3)
