"""`decorate` in Paddle's words, where no table speaks of it."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat import paddle

X = torch.ones(2, 4)


def pair():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    return model, paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())


def test_what_comes_back_has_the_shape_of_what_was_passed():
    (one, first), (other, second) = pair(), pair()
    assert paddle.amp.decorate(one, level="O2") is one
    models, optimizers = [other], [second]
    assert paddle.amp.decorate(models=models, optimizers=optimizers, level="O2") == (
        models,
        optimizers,
    )
    again, stepping = pair()
    assert paddle.amp.decorate(again, stepping, level="O1") == (again, stepping)
    assert paddle.amp.decorate([one]) == [one]
    assert isinstance(first, torch.optim.Optimizer)


def test_o1_changes_and_checks_nothing():
    assert paddle.amp.decorate("no model", "no optimizer", level="O1") == (
        "no model",
        "no optimizer",
    )


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two"])
def test_masters_keep_what_16_bits_lose(several):
    model, _ = pair()
    parts = (
        [list(model[0].parameters()), [*model[1].parameters(), *model[2].parameters()]]
        if several
        else [list(model.parameters())]
    )
    optimizers = [paddle.optimizer.SGD(learning_rate=1e-5, parameters=part) for part in parts]
    before = model[2].weight.detach().clone()
    paddle.amp.decorate(model, optimizers, level="O2")
    with paddle.amp.auto_cast(level="O2"):
        model(X).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    mezzo.undecorate(model)
    assert 0 < (model[2].weight - before).abs().max() < 1e-3


def test_without_masters_small_updates_are_lost():
    model, optimizer = pair()
    optimizer.set_lr(1e-7)
    paddle.amp.decorate(model, optimizer, level="O2", master_weight=False)
    before = model[2].weight.detach().clone()
    with paddle.amp.auto_cast(level="O2"):
        model(X).square().sum().backward()
    optimizer.step()
    assert torch.equal(model[2].weight, before)


def test_gradients_are_float32_with_master_grad_and_16_bit_without():
    seen = {}
    for master_grad in (True, False):
        model, optimizer = pair()
        paddle.amp.decorate(model, optimizer, level="O2", master_grad=master_grad)
        with paddle.amp.auto_cast(level="O2"):
            model(X).sum().backward()
        seen[master_grad] = model[0].weight.grad.dtype
    assert seen == {True: torch.float32, False: torch.float16}


def test_inside_auto_cast_its_lists_hold_and_outside_the_model_runs_by_itself():
    model, _ = pair()
    paddle.amp.decorate(model, level="O2")
    with paddle.amp.auto_cast(level="O2", custom_black_list={"linear_v2"}):
        assert model(X).dtype is torch.float32
    assert model(X).dtype is torch.float16


def test_a_saved_state_is_as_exact_as_the_masters():
    model, optimizer = pair()
    exact = model[0].weight.detach().clone()
    paddle.amp.decorate(model, optimizer, level="O2", save_dtype="float64")
    state = model.state_dict()
    assert torch.equal(state["0.weight"], exact.double())
    assert {value.dtype for value in state.values()} == {torch.float64}
    assert model[0].weight.dtype is torch.float16


def test_a_saved_state_without_masters_is_the_rounded_one():
    model, _ = pair()
    rounded = model[0].weight.detach().half()
    paddle.amp.decorate(model, level="O2", save_dtype="float32")
    assert torch.equal(model.state_dict()["0.weight"], rounded.float())


def test_a_saved_state_loads_again():
    (one, stepping), (other, others) = pair(), pair()
    paddle.amp.decorate(one, stepping, level="O2", save_dtype="float32")
    paddle.amp.decorate(other, others, level="O2")
    nn.init.zeros_(other[0].weight)
    other.load_state_dict(one.state_dict())
    assert torch.equal(mezzo.undecorate(other)[0].weight, mezzo.undecorate(one)[0].weight)


def test_undecorating_ends_the_saving_too():
    model, optimizer = pair()
    paddle.amp.decorate(model, optimizer, level="O2", save_dtype="float64")
    mezzo.undecorate(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(("first", "second"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_decorating_anew_gives_the_new_dtype_throughout(first, second):
    model, optimizer = pair()
    paddle.amp.decorate(model, optimizer, level="O2", dtype=first)
    paddle.amp.decorate(model, optimizer, level="O2", dtype=second)
    assert model[0].weight.dtype is model[2].bias.dtype is getattr(torch, second)


def test_decorating_anew_without_naming_the_optimizer_keeps_its_masters():
    model, optimizer = pair()
    exact = model[0].weight.detach().clone()
    paddle.amp.decorate(model, optimizer, level="O2")
    paddle.amp.decorate(model, level="O2", dtype="bfloat16")
    assert torch.equal(mezzo.undecorate(model)[0].weight, exact)


def test_decorating_anew_without_an_optimizer_of_torchs_is_refused():
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paddle.amp.decorate(model, optimizer, level="O2")
    with pytest.raises(ValueError, match=r"decorated already.*undecorate"):
        paddle.amp.decorate(model, level="O2")


class Broken:
    pass


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            {"level": "O0"},
            ValueError,
            (
                "level should be O1 or O2, O1 represent AMP train mode, O2 represent Pure fp16"
                " train mode"
            ),
        ),
        ({"level": "o2"}, ValueError, "level should be O1 or O2"),
        ({"dtype": "float32"}, ValueError, "dtype only support float16 or bfloat16"),
        ({"level": "O1", "dtype": "float32"}, ValueError, "dtype only support float16 or bfloat16"),
        (
            {"models": (nn.Linear(1, 1),)},
            TypeError,
            "models must be either a single model or a list of models",
        ),
        (
            {"models": [Broken()]},
            RuntimeError,
            r"models should be paddle.nn.Layer, but receive <class '.*Broken'>",
        ),
        (
            {"models": [paddle.DataParallel(nn.Linear(1, 1))]},
            RuntimeError,
            r"first use paddle.amp.decorate\(\) to decorate origin model",
        ),
        (
            {"models": nn.DataParallel(nn.Linear(1, 1))},
            RuntimeError,
            "and then call paddle.DataParallel get distributed model",
        ),
        (
            {"optimizers": (1,)},
            TypeError,
            "optimizers must be either a single optimizer or a list of optimizers",
        ),
        (
            {"optimizers": [1]},
            RuntimeError,
            "optimizers should be paddle.optimizer.Optimizer, but receive <class 'int'>",
        ),
        (
            {"save_dtype": "int8"},
            ValueError,
            "save_dtype can only be float16 float32 or float64, but your input save_dtype is int8",
        ),
        (
            {"excluded_layers": "fc"},
            TypeError,
            (
                "excluded_layers must be either a nn.Layer instance/type or a list of nn.Layer"
                " instances/types"
            ),
        ),
        ({"excluded_layers": ["fc"]}, TypeError, r"issubclass\(\) arg 1 must be a class"),
        ({"excluded_layers": [int]}, TypeError, "excluded_layers has <class 'int'>"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_refused_changes_nothing(words, error, message):
    model, optimizer = pair()
    with pytest.raises(error, match=message):
        paddle.amp.decorate(**{"models": model, "optimizers": optimizer, "level": "O2", **words})
    assert model[0].weight.dtype is torch.float32


def test_a_whole_model_goes_into_a_file_with_the_dtype_that_it_saves():
    model = paddle.amp.decorate(models=nn.Linear(2, 2), level="O2", save_dtype="float32")
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded.weight.dtype, loaded.state_dict()["weight"].dtype) == (
        torch.float16,
        torch.float32,
    )
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))
