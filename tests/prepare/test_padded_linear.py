"""Padding of large linear layers whose number of outputs is not a multiple of 8."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from mezzo.prepare import forward

ODD = 1025


class Subclass(nn.Linear):
    """May override `forward`."""


@pytest.fixture
def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "head": nn.Linear(1024, ODD),
            "even": nn.Linear(1024, 1024),
            "small": nn.Linear(8, 9),
            "subclass": Subclass(1024, ODD),
        }
    )


def test_large_plain_layers_with_unaligned_rows_are_padded_on_a_gpu(model: nn.Module) -> None:
    assert [layer.name for layer in forward.find_paddable([model], "cuda")] == ["head"]
    assert forward.find_paddable([model], "cpu") == ()


def test_a_layer_with_a_replaced_forward_is_not_padded(model: nn.Module) -> None:
    model["head"].forward = lambda inputs: inputs
    assert forward.find_paddable([model], "cuda") == ()


def test_the_description_has_the_number_of_outputs_and_the_reason(model: nn.Module) -> None:
    (layer,) = forward.find_paddable([model], "cuda")
    assert str(layer) == (
        "head computes 1032 outputs and returns 1025:"
        " rows of 16-bit numbers are fast in multiples of 8"
    )


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_those_of_the_plain_layer(bias: bool) -> None:
    plain = nn.Linear(1024, ODD, bias=bias).double()
    padded = copy.deepcopy(plain)
    forward.pad_outputs(forward.PaddedLinear("", padded))
    results = []
    for layer in (plain, padded):
        inputs = (
            torch.linspace(-1, 1, 3 * 2 * 1024, dtype=torch.float64)
            .view(3, 2, 1024)
            .requires_grad_()
        )
        outputs = layer(inputs)
        outputs.square().sum().backward()
        results.append(
            [outputs, inputs.grad, *(parameter.grad for parameter in layer.parameters())]
        )
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12)


def test_outputs_are_contiguous() -> None:
    layer = nn.Linear(1024, ODD)
    forward.pad_outputs(forward.PaddedLinear("", layer))
    assert layer(torch.ones(2, 1024)).view(-1).shape == (2 * ODD,)


def test_undo_restores_the_forward() -> None:
    layer = nn.Linear(1024, ODD)
    undo = forward.pad_outputs(forward.PaddedLinear("", layer))
    assert "forward" in layer.__dict__
    undo()
    assert "forward" not in layer.__dict__


def test_a_padded_layer_is_pickled_as_a_plain_one() -> None:
    layer = nn.Linear(16, 3)
    forward.pad_outputs(forward.PaddedLinear("head", layer))
    loaded = pickle.loads(pickle.dumps(layer))
    assert torch.allclose(loaded(torch.ones(2, 16)), layer(torch.ones(2, 16)))
    assert loaded.forward.__func__ is nn.Linear.forward
