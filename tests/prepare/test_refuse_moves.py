"""A decorated model is not moved away from its masters and its region."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mezzo


def made(level="O2"):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return mezzo.decorate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), level, dtype="bfloat16"
    )[0]


MOVES = {
    "device": lambda model: model.to("meta"),
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.float16),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moving_a_decorated_model_is_told_the_right_order_and_changes_nothing(move):
    model = made()
    with pytest.raises(mezzo.UnsupportedError, match="First move, then decorate"):
        move(model)
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 2 + [
        torch.float32
    ] * 2
    mezzo.undecorate(model)
    move(model)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moving_a_part_is_refused_as_moving_the_whole(move):
    model = made()
    with pytest.raises(
        mezzo.UnsupportedError, match=r"'0\.weight' would go from torch\.bfloat16 on cpu"
    ):
        move(model[0])
    assert model[0].bfloat16() is model[0]
    assert [parameter.dtype for parameter in mezzo.undecorate(model).parameters()] == [
        torch.float32
    ] * 4
    move(model[0])


def test_a_part_that_holds_nothing_but_buffers_is_guarded_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    model[1].register_buffer("table", torch.rand(4))
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match=r"'1.table' would go"):
        model[1].float()


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


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "pickled"],
)
def test_a_copy_goes_where_it_likes(copied):
    assert copied(made()).float()[0].weight.dtype is torch.float32
    assert copied(made())[0].float().weight.dtype is torch.float32
    # Of a part alone, and of a copy of a copy.
    part = copied(copied(made()[0]))
    assert part.float().weight.dtype is torch.float32
    assert part._apply.__self__ is part
