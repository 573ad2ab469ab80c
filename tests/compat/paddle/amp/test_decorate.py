"""`paddle.amp.decorate`: behaviour that Paddle's recorded tables do not cover."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle.amp._decorate import keep_full_list

X = torch.ones(2, 4)


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    return model, paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())


def test_arguments_are_returned_in_the_shape_they_were_passed():
    (single, _), (model, optimizer) = model_and_optimizer(), model_and_optimizer()
    assert paddle.amp.decorate(single, level="O2") is single
    models, optimizers = [model], [optimizer]
    assert paddle.amp.decorate(models=models, optimizers=optimizers, level="O2") == (
        models,
        optimizers,
    )
    model, optimizer = model_and_optimizer()
    assert paddle.amp.decorate(model, optimizer, level="O1") == (model, optimizer)
    assert paddle.amp.decorate([single]) == [single]


def test_o1_changes_and_checks_nothing():
    assert paddle.amp.decorate("no model", "no optimizer", level="O1") == (
        "no model",
        "no optimizer",
    )


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two"])
def test_masters_keep_updates_that_16_bits_would_lose(several):
    model, _ = model_and_optimizer()
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
    model, optimizer = model_and_optimizer()
    optimizer.set_lr(1e-7)
    paddle.amp.decorate(model, optimizer, level="O2", master_weight=False)
    before = model[2].weight.detach().clone()
    with paddle.amp.auto_cast(level="O2"):
        model(X).square().sum().backward()
    optimizer.step()
    assert torch.equal(model[2].weight, before)


def test_gradients_are_float32_with_master_grad_and_16_bit_without():
    grad_dtypes = {}
    for master_grad in (True, False):
        model, optimizer = model_and_optimizer()
        paddle.amp.decorate(model, optimizer, level="O2", master_grad=master_grad)
        with paddle.amp.auto_cast(level="O2"):
            model(X).sum().backward()
        grad_dtypes[master_grad] = model[0].weight.grad.dtype
    assert grad_dtypes == {True: torch.float32, False: torch.float16}


def test_a_model_follows_auto_casts_lists_inside_and_its_own_level_outside():
    model, _ = model_and_optimizer()
    paddle.amp.decorate(model, level="O2")
    with paddle.amp.auto_cast(level="O2", custom_black_list={"linear_v2"}):
        assert model(X).dtype is torch.float32
    assert model(X).dtype is torch.float16


def test_a_saved_state_has_the_values_of_the_masters():
    model, optimizer = model_and_optimizer()
    exact = model[0].weight.detach().clone()
    paddle.amp.decorate(model, optimizer, level="O2", save_dtype="float64")
    state = model.state_dict()
    assert torch.equal(state["0.weight"], exact.double())
    assert {value.dtype for value in state.values()} == {torch.float64}
    assert model[0].weight.dtype is torch.float16


def test_without_masters_a_saved_state_has_the_rounded_values():
    model, _ = model_and_optimizer()
    rounded = model[0].weight.detach().half()
    paddle.amp.decorate(model, level="O2", save_dtype="float32")
    assert torch.equal(model.state_dict()["0.weight"], rounded.float())


def test_a_saved_state_can_be_loaded():
    (saved, saved_optimizer), (loaded, loaded_optimizer) = (
        model_and_optimizer(),
        model_and_optimizer(),
    )
    paddle.amp.decorate(saved, saved_optimizer, level="O2", save_dtype="float32")
    paddle.amp.decorate(loaded, loaded_optimizer, level="O2")
    nn.init.zeros_(loaded[0].weight)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(mezzo.undecorate(loaded)[0].weight, mezzo.undecorate(saved)[0].weight)


def test_undecorate_removes_the_save_dtype():
    model, optimizer = model_and_optimizer()
    paddle.amp.decorate(model, optimizer, level="O2", save_dtype="float64")
    mezzo.undecorate(model)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(("first", "second"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_decorating_again_gives_the_new_dtype_throughout(first, second):
    model, optimizer = model_and_optimizer()
    paddle.amp.decorate(model, optimizer, level="O2", dtype=first)
    paddle.amp.decorate(model, optimizer, level="O2", dtype=second)
    assert model[0].weight.dtype is model[2].bias.dtype is getattr(torch, second)


def test_decorating_again_without_passing_the_optimizer_keeps_its_masters():
    model, optimizer = model_and_optimizer()
    exact = model[0].weight.detach().clone()
    paddle.amp.decorate(model, optimizer, level="O2")
    paddle.amp.decorate(model, level="O2", dtype="bfloat16")
    assert torch.equal(mezzo.undecorate(model)[0].weight, exact)


def test_decorating_again_without_passing_a_torch_optimizer_raises():
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paddle.amp.decorate(model, optimizer, level="O2")
    with pytest.raises(ValueError, match=r"decorated already.*undecorate"):
        paddle.amp.decorate(model, level="O2")


class NotAModule:
    pass


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
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
            {"models": [NotAModule()]},
            RuntimeError,
            r"models should be paddle.nn.Layer, but receive <class '.*NotAModule'>",
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
def test_invalid_arguments_raise_and_change_nothing(kwargs, error, message):
    model, optimizer = model_and_optimizer()
    with pytest.raises(error, match=message):
        paddle.amp.decorate(**{"models": model, "optimizers": optimizer, "level": "O2", **kwargs})
    assert model[0].weight.dtype is torch.float32


def test_a_pickled_model_keeps_its_save_dtype():
    model = paddle.amp.decorate(models=nn.Linear(2, 2), level="O2", save_dtype="float32")
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded.weight.dtype, loaded.state_dict()["weight"].dtype) == (
        torch.float16,
        torch.float32,
    )
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))


def network_with_norms():
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), nn.BatchNorm1d(2), nn.GroupNorm(1, 2)
    )


def test_batch_norms_stay_float32_always_and_layer_norms_with_float16():
    model = network_with_norms()
    assert keep_full_list([model], "float16", None) == [model[0][1], model[1]]
    assert keep_full_list([model], "bfloat16", None) == [model[1]]


def test_an_excluded_layer_is_kept_whole_and_an_excluded_type_without_its_children():
    class Scaled(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 2))
            self.scale = nn.Parameter(nn.Linear(1, 1).bias.detach())

    model = nn.Sequential(Scaled(), nn.Linear(2, 2))
    assert keep_full_list([model], "bfloat16", model[0]) == [model[0]]
    assert keep_full_list([model], "bfloat16", Scaled) == ["0.scale"]
    assert keep_full_list([model], "bfloat16", [nn.Linear]) == [model[0][0], model[1]]


def test_an_excluded_layer_of_another_model_has_no_effect():
    assert (
        keep_full_list([network_with_norms()], "bfloat16", [nn.Linear(1, 1)])[0].num_features == 2
    )
