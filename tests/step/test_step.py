"""Calls that add up to updates."""

from __future__ import annotations

import pytest
from support.step_models import Made, batches, in_steps


def test_calls_and_updates_are_counted():
    _, step = in_steps(Made("mlp"), batches("mlp", 7), "O1", "bfloat16", accumulate=3)
    assert (step.state_dict()["position"], step.state_dict()["updates"]) == (1, 2)
    step.flush()
    assert (step.state_dict()["position"], step.state_dict()["updates"]) == (0, 3)


def test_a_flush_without_calls_does_nothing():
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 3), "O1", "bfloat16", accumulate=3)
    before = made.model.layers[0].weight.clone()
    step.flush()
    assert step.state_dict()["updates"] == 1
    assert (made.model.layers[0].weight == before).all()


def test_a_call_that_raises_is_no_call():
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 1), "O1", "bfloat16", accumulate=3)
    (x, _), *_ = batches("mlp", 1)
    with pytest.raises(TypeError, match="boost"):
        step(x, "no target")
    assert step.state_dict()["position"] == 1
