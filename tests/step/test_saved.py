"""States that do not fit are refused before anything changes. That fitting ones resume to the bit is shown with the steps."""

from __future__ import annotations

import pytest
from support.step_models import Made, batches, copied, in_steps, same, weights

import mezzo


def made(dtype="float16", **words):
    return in_steps(Made("mlp"), batches("mlp", 3), "O1", dtype, **words)[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("rng"), "lacks rng"),
        (lambda state: state["optimizers"].clear(), "0 optimizers"),
        (lambda state: state.update(scaler=None), "the state has none"),
        (lambda state: state.update(position=5), "accumulate=2"),
    ],
    ids=["part", "count", "scaler", "position"],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    step = made(accumulate=2)
    state = copied(step.state_dict())
    change(state)
    before = weights(step.model)
    with pytest.raises(mezzo.CheckpointError, match=message):
        step.load_state_dict(state)
    assert same(weights(step.model), before)


def test_gradients_are_saved_only_while_calls_accumulate():
    assert made().state_dict()["gradients"] is None
    assert made(accumulate=2).state_dict()["gradients"] is not None
