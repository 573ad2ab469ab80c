"""What a function sees beside its arguments."""

from __future__ import annotations

import torch

from mezzo.step.inputs import closure_values

WEIGHT = 1.0


def weighted(loss):
    return loss * WEIGHT


def test_globals_that_change_are_seen(monkeypatch):
    ask = closure_values(weighted)
    before = ask()
    monkeypatch.setitem(globals(), "WEIGHT", 2.0)
    assert (before, ask()) == ((1.0,), (2.0,))


def test_tensors_in_a_closure_are_not_compared():
    held = torch.ones(2)
    assert closure_values(lambda: held)() == ()


def test_what_is_no_function_sees_nothing():
    assert closure_values(torch.nn.MSELoss())() == ()


def test_a_cell_that_is_empty_yet_is_no_error():
    ask = closure_values(lambda: later)
    before = ask()
    later = 3
    assert (before, ask()) == ((), (3,))
