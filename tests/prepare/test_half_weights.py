"""A converted tensor stays the same object, and comes back with what it was."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from mezzo.optim.master_weights import MasterWeights
from mezzo.prepare.half_weights import HalfWeights


def adopted(tensor, kind="float32", grad_dtype=torch.bfloat16):
    weights, rollback = HalfWeights(), ExitStack()
    weights.convert(tensor, torch.bfloat16, grad_dtype, MasterWeights(kind), rollback)
    return weights, rollback


@pytest.mark.parametrize("kind", ["float32", "kahan", "none"])
def test_rolling_back_puts_the_very_memory_back(kind):
    parameter = nn.Parameter(torch.rand(4))
    parameter.grad = torch.rand(4)
    pointer, gradient = parameter.data_ptr(), parameter.grad
    _, rollback = adopted(parameter, kind, torch.float32)
    assert parameter.dtype is torch.bfloat16
    rollback.close()
    assert parameter.data_ptr() == pointer
    assert parameter.grad is gradient
    assert parameter.grad_dtype is torch.float32


def test_a_written_value_is_read_back_exactly():
    parameter = nn.Parameter(torch.zeros(4))
    weights, _ = adopted(parameter)
    value = torch.rand(4) + 1 / 3
    weights.write(parameter, value)
    assert torch.equal(weights.read(parameter), value)
    assert torch.equal(parameter, value.bfloat16())
    assert weights.is_exact(parameter)


def test_a_gradient_dtype_that_was_set_by_hand_comes_back():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad_dtype = None
    weights, _ = adopted(parameter)
    assert parameter.grad_dtype is torch.bfloat16
    weights.restore()
    assert parameter.grad_dtype is None
    assert parameter not in weights


def test_a_buffer_is_converted_and_comes_back_with_its_exact_value():
    buffer = torch.rand(4) + 1 / 3
    original = buffer.clone()
    weights, _ = adopted(buffer)
    assert buffer.dtype is torch.bfloat16
    weights.restore()
    assert torch.equal(buffer, original)


def test_channels_last_stays_so():
    parameter = nn.Parameter(torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last))
    weights, _ = adopted(parameter)
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    weights.restore()
    assert parameter.is_contiguous(memory_format=torch.channels_last)
