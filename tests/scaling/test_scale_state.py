"""The loss scale as a value: transitions, bounds, invalid rules, traces of PaddlePaddle."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scaler_traces import Trace, traces

from mezzo import PolicyError, ScaleRule, ScaleState
from mezzo.scaling.scale_state import (
    LARGEST,
    SMALLEST,
    OnCollapse,
    OptimizerStage,
    float32,
    next_state,
)

TRACES = traces()


def after_good(state: ScaleState, rule: ScaleRule, steps: int = 1) -> ScaleState:
    for _ in range(steps):
        state = next_state(state, rule, found_nonfinite=False)
    return state


def after_skips(state: ScaleState, rule: ScaleRule, steps: int = 1) -> ScaleState:
    for _ in range(steps):
        state = next_state(state, rule, found_nonfinite=True)
    return state


def test_there_are_47_traces_of_200_steps():
    assert [len(trace.kinds) for trace in TRACES] == [200] * 47
    assert all(len(trace.after) == 200 for trace in TRACES)


@pytest.mark.parametrize("trace", TRACES, ids=range(len(TRACES)))
def test_a_trace_of_paddles_scaler_is_reproduced_exactly(trace: Trace):
    rule, state = trace.rule_and_state()
    for step, (kind, (scale, growth_tracker, backoff_tracker)) in enumerate(
        zip(trace.kinds, trace.after, strict=True)
    ):
        state = next_state(state, rule, found_nonfinite=kind != ".")
        assert state.scale == scale, step
        if rule.dynamic and rule.growth_interval and rule.backoff_interval:
            assert (state.growth_tracker, state.backoff_tracker) == (
                growth_tracker,
                backoff_tracker,
            ), step


class Model:
    """An independent model of the rule, written from its description with plain numbers."""

    def __init__(self, rule: ScaleRule, scale: float) -> None:
        self.rule, self.scale = rule, scale
        self.streak = self.strikes = self.seen = self.good = self.skipped = self.row = 0

    def feed(self, is_nonfinite: bool) -> None:
        rule, adapting = self.rule, self.rule.dynamic and self.seen >= self.rule.warmup_steps
        self.seen += 1
        if is_nonfinite:
            self.skipped, self.row = self.skipped + 1, self.row + 1
            if adapting:
                self.streak, self.strikes = 0, self.strikes + 1
                if self.strikes == rule.backoff_interval or (
                    rule.backoff_interval and self.strikes > rule.backoff_interval
                ):
                    self.scale = self.rounded(self.scale * rule.backoff_factor)
                    # DeepSpeed then backs off at each further skip until the scale grows.
                    self.strikes = 0 if rule.consecutive_backoff else self.strikes - 1
        else:
            self.good, self.row = self.good + 1, 0
            if adapting:
                self.streak += 1
                self.strikes *= not rule.consecutive_backoff
                if rule.growth_interval and self.streak >= rule.growth_interval:
                    self.scale, self.streak, self.strikes = (
                        self.rounded(self.scale * rule.growth_factor),
                        0,
                        0,
                    )

    def rounded(self, scale: float) -> float:
        try:
            scale = struct.unpack("<f", struct.pack("<f", scale))[0]
        except OverflowError:
            scale = self.scale
        low, high = (
            struct.unpack("<f", struct.pack("<f", bound))[0]
            for bound in (self.rule.min_scale, self.rule.max_scale)
        )
        return sorted((low, scale, high))[1]


rules = st.builds(
    ScaleRule,
    growth_factor=st.floats(1.001, 1e6),
    backoff_factor=st.floats(1e-6, 0.999),
    growth_interval=st.integers(0, 12),
    backoff_interval=st.integers(0, 5),
    consecutive_backoff=st.booleans(),
    min_scale=st.sampled_from([SMALLEST, 2.0**-24, 0.1, 1.0, 128.0]),
    max_scale=st.sampled_from([LARGEST, 2.0**24, 1000.1]),
    dynamic=st.sampled_from([True, True, True, False]),
    warmup_steps=st.integers(0, 10),
)


@settings(max_examples=250, deadline=None)
@given(rule=rules, start=st.floats(2.0**-30, 2.0**100), steps=st.integers(0, 2**400 - 1))
def test_a_hundred_thousand_random_steps_agree_with_an_independent_model(
    rule: ScaleRule, start: float, steps: int
):
    state = ScaleState(rule.clamp(start))
    model = Model(rule, state.scale)
    for step in range(400):
        is_nonfinite = bool(steps >> step & 1)
        state = next_state(state, rule, found_nonfinite=is_nonfinite)
        model.feed(is_nonfinite)
        assert state == ScaleState(
            model.scale, model.streak, model.strikes, model.good, model.skipped, model.row
        )
        assert float32(rule.min_scale) <= state.scale <= float32(rule.max_scale)


def test_the_scale_backs_off_after_backoff_interval_skips_in_a_row():
    rule = ScaleRule(backoff_interval=2)
    once = after_skips(ScaleState(8.0), rule)
    assert once.scale == 8.0
    assert after_skips(once, rule).scale == 4.0
    assert after_skips(after_good(once, rule), rule).scale == 8.0


def test_skips_that_need_not_be_consecutive_are_counted_across_successful_steps():
    rule = ScaleRule(backoff_interval=2, consecutive_backoff=False)
    assert after_skips(after_good(after_skips(ScaleState(8.0), rule), rule), rule).scale == 4.0


def test_growth_resets_the_backoff_tracker_as_in_deepspeed():
    rule = ScaleRule(backoff_interval=2, consecutive_backoff=False, growth_interval=3)
    used_up = after_skips(ScaleState(64.0), rule, 2)
    assert used_up.scale == 32.0
    assert after_skips(after_good(used_up, rule), rule).scale == 16.0
    grown = after_good(used_up, rule, 3)
    assert grown.scale == 64.0
    assert after_skips(grown, rule).scale == 64.0


def test_the_scale_does_not_change_during_warmup_but_steps_are_counted():
    rule = ScaleRule(growth_interval=1, warmup_steps=3)
    state = after_skips(after_good(ScaleState(8.0), rule, 2), rule)
    assert (state.scale, state.good_steps, state.skipped_steps) == (8.0, 2, 1)
    assert after_good(state, rule).scale == 16.0


def test_a_static_scale_counts_steps_and_never_changes():
    state = after_skips(
        after_good(ScaleState(8.0), ScaleRule(growth_interval=1, dynamic=False), 3),
        ScaleRule(dynamic=False),
        2,
    )
    assert state == ScaleState(8.0, 0, 0, 3, 2, 2)


def test_300_skips_end_at_the_floor_and_successful_steps_recover():
    rule = ScaleRule(growth_interval=10)
    state = after_skips(ScaleState(), rule, 300)
    assert (state.scale, state.consecutive_skips) == (2.0**-24, 300)
    assert after_good(state, rule, 400).scale == 2.0**16


def test_the_scale_does_not_grow_past_the_largest_float32():
    assert after_good(ScaleState(2.0**127), ScaleRule(growth_interval=1)).scale == 2.0**127


def test_a_floor_is_rounded_to_the_nearest_float32():
    rule = ScaleRule(min_scale=0.1)
    state = after_skips(ScaleState(1.0), rule, 9)
    assert state.scale == rule.floor == float32(0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("growth_factor", 1.0),
        ("growth_factor", math.inf),
        ("growth_factor", math.nan),
        ("backoff_factor", 1.0),
        ("backoff_factor", math.nan),
        ("growth_interval", -1),
        ("growth_interval", 2.5),
        ("backoff_interval", -1),
        ("warmup_steps", -1),
        ("min_scale", 0.0),
        ("min_scale", math.nan),
        ("min_scale", 2.0**-127),
        ("max_scale", math.inf),
        ("max_scale", 2.0**-25),
    ],
)
def test_an_invalid_rule_raises_with_name_and_value(field: str, value: float):
    with pytest.raises(PolicyError, match=f"{field}={value!r}"):
        ScaleRule(**{field: value})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_state_has_a_positive_finite_scale(scale: float):
    with pytest.raises(PolicyError, match="positive finite"):
        ScaleState(scale)
    with pytest.raises(PolicyError, match="positive finite"):
        replace(ScaleState(), scale=scale)


def test_after_is_next_state():
    assert ScaleRule().after(ScaleState(8.0), found_nonfinite=True) == next_state(
        ScaleState(8.0), ScaleRule(), found_nonfinite=True
    )


@pytest.mark.parametrize("kind", [OnCollapse, OptimizerStage])
def test_every_member_is_parsed_from_its_value_and_another_string_raises(kind):
    assert [kind.parse(member.value) for member in kind] == list(kind)
    with pytest.raises(PolicyError, match="Choose one of"):
        kind.parse("sometimes")
