"""`mxnet.autograd`."""

import torch
from torch import nn

from mezzo.compat.mxnet import amp, autograd


def test_head_gradients_default_to_one():
    weight = nn.Parameter(torch.ones(2))
    autograd.backward(weight * 3.0)
    assert weight.grad.tolist() == [3.0, 3.0]
    autograd.backward([weight * 1.0, weight.sum()], [torch.tensor([10.0, 20.0]), torch.tensor(1.0)])
    assert weight.grad.tolist() == [14.0, 24.0]


def test_retain_graph_allows_a_second_backward():
    weight = nn.Parameter(torch.ones(2))
    doubled = weight * weight
    for _ in range(2):
        autograd.backward(doubled, torch.tensor([1.0, 2.0]), retain_graph=True)
    assert weight.grad.tolist() == [4.0, 8.0]


def test_record_and_pause_set_grad_mode():
    weight = nn.Parameter(torch.ones(1))
    with torch.no_grad(), autograd.record():
        assert (weight * 2).requires_grad
        with autograd.pause():
            assert not (weight * 2).requires_grad


def test_backward_runs_without_autocast():
    weight, dtypes = nn.Parameter(torch.ones(1)), []
    amp.init()
    head = weight * 2.0
    head.register_hook(
        lambda _: dtypes.append(nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype)
    )
    autograd.backward(head)
    assert dtypes == [torch.float32]
