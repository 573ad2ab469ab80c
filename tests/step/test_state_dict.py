"""States that do not fit are refused before anything changes. That fitting ones resume to the bit is shown with the steps."""

from __future__ import annotations

import pytest
import torch
from support.states import assert_equal
from support.step_models import Made, batches, copied, in_steps

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
        (lambda state: state.update(position=-1), "position is -1, not a number of calls"),
        (lambda state: state.update(updates="many"), "updates is 'many'"),
        (lambda state: state.update(models={}), "models are {}, not a list"),
        (lambda state: state.update(gradients=None), "has no gradients, but position 1"),
        (lambda state: state["gradients"][0].pop(), r"gradients\[0\] are not a list"),
        (
            lambda state: state["gradients"][0].__setitem__(0, torch.ones(1)),
            r"'gradients\[0\]\[0\]' has shape \(1,\)",
        ),
        (lambda state: state["gradients"][0].__setitem__(0, 3), r"'gradients\[0\]\[0\]' is 3"),
        (
            lambda state: state["gradients"][0].__setitem__(0, state["gradients"][0][0].double()),
            "gradients and buffers cannot be loaded",
        ),
        (lambda state: state["rng"].pop("python"), "random generators"),
        (
            lambda state: state["scaler"].update(scale=-1.0),
            "GradScaler cannot be loaded.*which no gradient survives",
        ),
        (lambda state: state["optimizers"][0].pop("state"), "not the state of an optimizer"),
        (lambda state: state.clear(), "it lacks models"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message):
    step = made(accumulate=2)
    state = copied(step.state_dict())
    change(state)
    before = copied(step.state_dict())
    with pytest.raises(mezzo.CheckpointError, match=message):
        step.load_state_dict(state)
    assert_equal(before, step.state_dict())


def test_what_is_no_dictionary_is_refused():
    with pytest.raises(mezzo.CheckpointError, match="not the state of a step"):
        made().load_state_dict([])


def test_buffers_of_an_unfinished_update_are_checked():
    step = in_steps(Made("cnn"), batches("cnn", 3), "O1", "float16", accumulate=2)[1]
    state = copied(step.state_dict())
    place = next(place for place, value in enumerate(state["buffers"]) if value is not None)
    state["buffers"][place] = torch.ones(2, 2, 2)
    before = copied(step.state_dict())
    with pytest.raises(mezzo.CheckpointError, match="buffers"):
        step.load_state_dict(state)
    assert_equal(before, step.state_dict())


def test_gradients_are_saved_only_while_calls_accumulate():
    assert made().state_dict()["gradients"] is None
    assert made(accumulate=2).state_dict()["gradients"] is not None
