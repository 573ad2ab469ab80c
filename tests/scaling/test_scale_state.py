"""The scale as a value: transitions, bounds, refusals, and the traces of PaddlePaddle."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scaler_traces import Trace, traces

from mezzo import PolicyError, ScaleRule, ScaleState
from mezzo.scaling.scale_state import LARGEST, SMALLEST, float32, next_state

TRACES = traces()


def good(state: ScaleState, rule: ScaleRule, steps: int = 1) -> ScaleState:
    for _ in range(steps):
        state = next_state(state, rule, found_nonfinite=False)
    return state


def bad(state: ScaleState, rule: ScaleRule, steps: int = 1) -> ScaleState:
    for _ in range(steps):
        state = next_state(state, rule, found_nonfinite=True)
    return state


def test_there_are_47_traces_of_200_steps():
    assert [len(trace.kinds) for trace in TRACES] == [200] * 47
    assert all(len(trace.after) == 200 for trace in TRACES)


@pytest.mark.parametrize("trace", TRACES, ids=range(len(TRACES)))
def test_a_trace_of_paddles_scaler_is_reproduced_exactly(trace: Trace):
    rule, state = trace.rule_and_state()
    for step, (kind, (scale, in_a_row, counted)) in enumerate(
        zip(trace.kinds, trace.after, strict=True)
    ):
        state = next_state(state, rule, found_nonfinite=kind != ".")
        assert state.scale == scale, step
        if rule.dynamic and rule.growth_interval and rule.backoff_interval:
            assert (state.growth_tracker, state.backoff_tracker) == (in_a_row, counted), step


class Model:
    """An independent model of the rule, written from its description with plain numbers."""

    def __init__(self, rule: ScaleRule, scale: float) -> None:
        self.rule, self.scale = rule, scale
        self.streak = self.strikes = self.seen = self.good = self.skipped = self.row = 0

    def feed(self, is_bad: bool) -> None:
        rule, adapting = self.rule, self.rule.dynamic and self.seen >= self.rule.warmup_steps
        self.seen += 1
        if is_bad:
            self.skipped, self.row = self.skipped + 1, self.row + 1
            if adapting:
                self.streak, self.strikes = 0, self.strikes + 1
                if self.strikes == rule.backoff_interval or (
                    rule.backoff_interval and self.strikes > rule.backoff_interval
                ):
                    self.scale = self.rounded(self.scale * rule.backoff_factor)
                    # DeepSpeed's patience is used up until the scale grows; Paddle's begins again.
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
    for place in range(400):
        is_bad = bool(steps >> place & 1)
        state = next_state(state, rule, found_nonfinite=is_bad)
        model.feed(is_bad)
        assert state == ScaleState(
            model.scale, model.streak, model.strikes, model.good, model.skipped, model.row
        )
        assert float32(rule.min_scale) <= state.scale <= float32(rule.max_scale)


def test_backoff_waits_for_so_many_bad_steps_in_a_row():
    rule = ScaleRule(backoff_interval=2)
    once = bad(ScaleState(8.0), rule)
    assert once.scale == 8.0
    assert bad(once, rule).scale == 4.0
    assert bad(good(once, rule), rule).scale == 8.0


def test_bad_steps_that_need_not_be_consecutive_are_counted_through_good_ones():
    rule = ScaleRule(backoff_interval=2, consecutive_backoff=False)
    assert bad(good(bad(ScaleState(8.0), rule), rule), rule).scale == 4.0


def test_patience_that_good_steps_do_not_restore_is_restored_by_growth_as_in_deepspeed():
    rule = ScaleRule(backoff_interval=2, consecutive_backoff=False, growth_interval=3)
    used_up = bad(ScaleState(64.0), rule, 2)
    assert used_up.scale == 32.0
    assert bad(good(used_up, rule), rule).scale == 16.0
    grown = good(used_up, rule, 3)
    assert grown.scale == 64.0
    assert bad(grown, rule).scale == 64.0


def test_the_scale_stands_still_while_it_warms_up_but_steps_are_counted():
    rule = ScaleRule(growth_interval=1, warmup_steps=3)
    state = bad(good(ScaleState(8.0), rule, 2), rule)
    assert (state.scale, state.good_steps, state.skipped_steps) == (8.0, 2, 1)
    assert good(state, rule).scale == 16.0


def test_a_static_scale_counts_and_never_moves():
    state = bad(
        good(ScaleState(8.0), ScaleRule(growth_interval=1, dynamic=False), 3),
        ScaleRule(dynamic=False),
        2,
    )
    assert state == ScaleState(8.0, 0, 0, 3, 2, 2)


def test_three_hundred_bad_steps_end_at_the_floor_and_good_ones_recover():
    rule = ScaleRule(growth_interval=10)
    state = bad(ScaleState(), rule, 300)
    assert (state.scale, state.consecutive_skips) == (2.0**-24, 300)
    assert good(state, rule, 400).scale == 2.0**16


def test_growth_past_the_largest_float32_is_dropped_as_torch_drops_it():
    assert good(ScaleState(2.0**127), ScaleRule(growth_interval=1)).scale == 2.0**127


def test_a_floor_that_is_no_float32_is_reached_as_the_nearest_one():
    rule = ScaleRule(min_scale=0.1)
    state = bad(ScaleState(1.0), rule, 9)
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
def test_a_rule_that_makes_no_sense_is_refused_by_name_and_value(field: str, value: float):
    with pytest.raises(PolicyError, match=f"{field}={value!r}"):
        ScaleRule(**{field: value})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_no_gradient_survives_cannot_be_a_state(scale: float):
    with pytest.raises(PolicyError, match="positive finite"):
        ScaleState(scale)
    with pytest.raises(PolicyError, match="positive finite"):
        replace(ScaleState(), scale=scale)


def test_the_rule_reads_as_a_sentence():
    assert ScaleRule().after(ScaleState(8.0), found_nonfinite=True) == next_state(
        ScaleState(8.0), ScaleRule(), found_nonfinite=True
    )
