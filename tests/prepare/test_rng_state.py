"""States of random number generators are captured, checked and restored."""

import random
import sys

import numpy as np
import pytest
import torch
from support.states import assert_equal

import mezzo
from mezzo.prepare import rng_state


def test_every_generator_is_restored():
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002 - leaves the second of a pair for the next call
    state = rng_state.capture_rng_state()
    drawn = (
        torch.rand(2).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.randn(),  # noqa: NPY002
    )
    rng_state.restore_rng_state(state)
    assert drawn == (
        torch.rand(2).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.randn(),  # noqa: NPY002
    )


def test_a_state_without_numpy_does_not_change_numpy():
    state = {
        name: value for name, value in rng_state.capture_rng_state().items() if name != "numpy"
    }
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    rng_state.restore_rng_state(state)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_numpy_is_skipped_if_it_is_not_imported(monkeypatch):
    state = rng_state.capture_rng_state()
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in rng_state.capture_rng_state()
    rng_state.restore_rng_state(state)


def changed(name, index, value):
    state = rng_state.capture_rng_state()
    state[name] = (
        value if index is None else (*state[name][:index], value, *state[name][index + 1 :])
    )
    return state


@pytest.mark.parametrize(
    "state",
    [
        3,
        {},
        changed("torch", None, torch.zeros(5056)),
        changed("torch", None, torch.zeros(8, dtype=torch.uint8)),
        changed("python", 0, 9),
        changed("python", 1, (1, 2)),
        changed("python", 2, "text"),
        changed("numpy", 0, "PCG"),
        changed("numpy", 1, [1, 2]),
        # NumPy accepts these, and reads out of bounds at the next draw.
        changed("numpy", 2, 10**9),
        changed("numpy", 2, -5),
        changed("numpy", 4, "text"),
        changed("cuda", None, [torch.zeros(16)]),
        changed("cuda", None, [torch.zeros(99, dtype=torch.uint8)]),
    ],
)
def test_invalid_states_are_refused_and_no_generator_is_changed(state):
    before = rng_state.capture_rng_state()
    with pytest.raises(mezzo.CheckpointError, match="random generators"):
        rng_state.check_rng_state(state)
    assert_equal(before, rng_state.capture_rng_state())


def test_captured_states_are_valid():
    random.gauss(0, 1)
    rng_state.check_rng_state(rng_state.capture_rng_state())
