"""The decoration of models and optimizers, which copies do not have, and moves that are refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import mezzo
from mezzo.prepare.decoration import decoration_of


def decorated_pair():
    model = nn.Linear(4, 4)
    return mezzo.decorate(model, torch.optim.AdamW(model.parameters(), lr=0.1), dtype="bfloat16")


def test_models_and_optimizers_decorated_together_share_a_decoration():
    model, optimizer = decorated_pair()
    assert decoration_of(model) is decoration_of(optimizer) is not None
    mezzo.undecorate(model)
    assert decoration_of(model) is decoration_of(optimizer) is None


def test_copies_are_not_decorated():
    model, optimizer = decorated_pair()
    assert decoration_of(copy.deepcopy(model)) is None
    assert decoration_of(pickle.loads(pickle.dumps(optimizer))) is None
    assert pickle.loads(pickle.dumps(decoration_of(model))) is None


def test_a_decorated_pair_is_freed():
    model, optimizer = decorated_pair()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    references = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [one() for one in references] == [None, None, None]


# -- moves -----------------------------------------------------------------------------------------


def decorated_model(level="O2"):
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
def test_moving_a_decorated_model_is_refused_and_changes_nothing(move):
    model = decorated_model()
    with pytest.raises(mezzo.UnsupportedError, match="First move, then decorate"):
        move(model)
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 2 + [
        torch.float32
    ] * 2
    mezzo.undecorate(model)
    move(model)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moving_a_submodule_is_refused(move):
    model = decorated_model()
    with pytest.raises(
        mezzo.UnsupportedError, match=r"'0\.weight' cannot be moved from torch\.bfloat16 on cpu"
    ):
        move(model[0])
    assert model[0].bfloat16() is model[0]
    assert [parameter.dtype for parameter in mezzo.undecorate(model).parameters()] == [
        torch.float32
    ] * 4
    move(model[0])


def test_the_error_of_a_model_that_casts_a_layer_to_float32_names_keep_full():
    class Router(nn.Linear):
        def forward(self, x):
            return super(Router, self.float()).forward(x.float())

    def make(**options):
        model = nn.Sequential(nn.Linear(4, 4), Router(4, 4))
        return mezzo.decorate(model.eval(), dtype="bfloat16", **options)

    with pytest.raises(mezzo.UnsupportedError, match=r"keep_full={\*mezzo.NORMS, '1'}"):
        make()(torch.ones(2, 4))
    kept = make(keep_full={*mezzo.NORMS, "1"})
    assert kept(torch.ones(2, 4)).isfinite().all()
    assert kept[1].weight.dtype is torch.float32


def test_moving_a_submodule_of_buffers_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    model[1].register_buffer("table", torch.rand(4))
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match=r"'1.table' cannot be moved"):
        model[1].half()


def test_calls_that_move_nothing_are_allowed():
    model = decorated_model()
    assert model.to("cpu") is model
    assert model.cpu().share_memory() is model
    assert model.requires_grad_(requires_grad=False).eval() is model


def test_at_o1_only_another_device_type_is_refused():
    model = decorated_model("O1")
    with pytest.raises(mezzo.UnsupportedError, match="on meta"):
        model.to("meta")
    assert model.double()[0].weight.dtype is torch.float64


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "pickled"],
)
def test_a_copy_may_be_moved(copied):
    assert copied(decorated_model()).float()[0].weight.dtype is torch.float32
    assert copied(decorated_model())[0].float().weight.dtype is torch.float32
    # A submodule alone, and a copy of a copy.
    part = copied(copied(decorated_model()[0]))
    assert part.float().weight.dtype is torch.float32
    assert part._apply.__self__ is part
