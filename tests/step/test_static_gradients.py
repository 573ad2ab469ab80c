"""Gradients at fixed addresses, to which the captured calls of an accumulation add."""

from __future__ import annotations

import pytest
import torch

from mezzo.step.static_gradients import StaticGradients


@pytest.fixture
def parameters():
    return [torch.ones(2, requires_grad=True) for _ in range(2)]


@pytest.fixture
def static(parameters):
    static = StaticGradients()
    static.release(records=True)
    static.record([(one, torch.ones(2)) for one in parameters])
    assert static.allocate()
    return static


def have_gradients(parameters):
    return [one.grad is not None for one in parameters]


def test_gradients_that_no_call_has_added_to_are_removed(static, parameters):
    parameters[0].sum().backward()
    static.detach_unused()
    assert have_gradients(parameters) == [True, False]


def test_a_replay_adds_to_all_of_them(static, parameters):
    static.note_replay()
    static.detach_unused()
    assert have_gradients(parameters) == [True, True]


def test_an_eager_call_before_a_captured_update_does_not_count_after_it(static, parameters):
    parameters[0].sum().backward()
    assert static.note_eager_call([(parameters[0], parameters[0].grad)])
    # As a graph does, without a new version.
    parameters[0].grad.data.zero_()
    static.note_zeros()
    parameters[1].sum().backward()
    static.detach_unused()
    assert have_gradients(parameters) == [False, True]


def test_released_gradients_that_are_zero_are_removed(static, parameters):
    parameters[0].sum().backward()
    static.release(records=True)
    assert have_gradients(parameters) == [True, False]
    assert not static.exist


def test_gradients_that_other_code_removes_are_zero(static, parameters):
    (parameters[0].sum() + parameters[1].sum()).backward()
    gradients = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    static.attach()
    assert [one.grad for one in parameters] == gradients
    assert not torch.stack(gradients).any()
    static.detach_unused()
    assert have_gradients(parameters) == [False, False]


def test_values_of_gradients_that_other_code_replaces_are_kept(static, parameters):
    gradients = [one.grad for one in parameters]
    parameters[1].sum().backward()
    parameters[0].grad, parameters[1].grad = torch.full((2,), 3.0), None
    static.attach()
    assert all(one.grad is gradient for one, gradient in zip(parameters, gradients, strict=True))
    assert torch.stack(gradients).tolist() == [[3.0, 3.0], [0.0, 0.0]]
