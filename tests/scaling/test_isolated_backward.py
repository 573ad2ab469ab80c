"""Backward of one loss apart from the gradients that are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.scaling.gradients import backward_isolated, isolated_gradients


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_old_gradients_are_out_of_sight_inside_and_added_in_place_after():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = old = torch.full((2,), 10.0)
    with backward_isolated((parameter * 3).sum(), [sgd(parameter)]):
        assert parameter.grad.tolist() == [3.0, 3.0]
        parameter.grad.mul_(2)
    assert parameter.grad is old
    assert old.tolist() == [16.0, 16.0]


def test_a_parameter_that_the_loss_does_not_reach_keeps_its_gradient():
    reached, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    other.grad = old = torch.ones(2)
    with backward_isolated(reached.sum(), [sgd(reached, other)]):
        assert other.grad is None
    assert other.grad is old


def test_tensors_of_no_optimizer_get_no_gradient_of_unknown_scale():
    parameter, stranger = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with backward_isolated((parameter * stranger).sum(), [sgd(parameter)]):
        pass
    assert stranger.grad is None


def test_nothing_is_lost_when_backward_or_the_body_fails():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = old = torch.ones(2)
    with pytest.raises(RuntimeError), backward_isolated(parameter * 2, [sgd(parameter)]):
        pass
    assert parameter.grad is old
    with pytest.raises(OSError), backward_isolated(parameter.sum(), [sgd(parameter)]):
        raise OSError
    assert parameter.grad is old
    assert old.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_add_up(sparse_first: bool):
    table = nn.Embedding(3, 2, sparse=True)
    dense, sparse = torch.ones(3, 2), table(torch.tensor([1])).sum()
    if sparse_first:
        sparse.backward()
        with backward_isolated((table.weight * 1).sum(), [sgd(table.weight)]):
            pass
    else:
        table.weight.grad = dense
        with backward_isolated(sparse, [sgd(table.weight)]):
            pass
    assert table.weight.grad.to_dense().tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]


def test_frozen_parameters_are_left_out():
    parameter, frozen = (
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    )
    with backward_isolated(parameter.sum(), [sgd(parameter, frozen)]):
        pass
    assert frozen.grad is None


def test_any_backward_may_run_apart():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = old = torch.full((2,), 10.0)
    with isolated_gradients([sgd(parameter)]) as tensors:
        assert [tensor is parameter for tensor in tensors] == [True]
        (parameter * 3).sum().backward()
        (parameter * 3).sum().backward()
    assert parameter.grad is old
    assert old.tolist() == [16.0, 16.0]
