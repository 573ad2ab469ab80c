"""A decorated model is not moved away from its masters and its region."""

import copy

import pytest
import torch
from torch import nn

import mezzo


def made(level="O2"):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level, dtype="bfloat16")[0]


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("meta"),
        lambda model: model.half(),
        lambda model: model.float(),
        lambda model: model.double(),
        lambda model: model.to(torch.float16),
    ],
    ids=["device", "half", "float", "double", "to"],
)
def test_moving_a_decorated_model_is_told_the_right_order_and_changes_nothing(move):
    model = made()
    with pytest.raises(mezzo.UnsupportedError, match="First move, then decorate"):
        move(model)
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    mezzo.undecorate(model)
    move(model)


def test_what_moves_nothing_is_let_through():
    model = made()
    assert model.to("cpu") is model
    assert model.cpu().share_memory() is model
    assert model.requires_grad_(requires_grad=False).eval() is model


def test_at_o1_only_another_device_type_is_refused():
    model = made("O1")
    with pytest.raises(mezzo.UnsupportedError, match="on meta"):
        model.to("meta")
    assert model.double()[0].weight.dtype is torch.float64


def test_a_copy_goes_where_it_likes():
    assert copy.deepcopy(made()).float()[0].weight.dtype is torch.float32
