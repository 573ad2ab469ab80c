"""Random generators go on where they were."""

import random
import sys

import numpy as np
import torch

from mezzo.prepare import rng


def test_what_is_captured_is_plain_and_restores_every_generator():
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002 - leaves the second of a pair for the next call
    state = rng.capture()
    drawn = torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.randn()  # noqa: NPY002
    rng.restore(state)
    assert drawn == (torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.randn())  # noqa: NPY002


def test_a_state_without_numpy_leaves_numpy_alone():
    state = {name: value for name, value in rng.capture().items() if name != "numpy"}
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    rng.restore(state)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_where_numpy_is_not_imported_it_is_not_asked(monkeypatch):
    state = rng.capture()
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in rng.capture()
    rng.restore(state)
