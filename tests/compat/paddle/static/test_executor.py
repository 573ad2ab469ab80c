"""`paddle.static.Executor`: feeds, fetches, and running recorded nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import _places, static
from mezzo.compat.paddle.static._executor import call_in_eval, run_nodes


def test_variables_are_fetched_in_order_by_name_or_by_object(exe, program):
    x = static.data("x", [-1])
    double = x * 2
    assert [
        value.tolist()
        for value in exe.run(program, feed={"x": [1.0, 2.0]}, fetch_list=["x", double, double.name])
    ] == [[1, 2], [2, 4], [2, 4]]


def test_one_variable_or_name_may_be_fetched_without_a_list(exe, program):
    y = static.data("x", [1]) + 1
    for fetched in (y, y.name):
        assert exe.run(program, feed={"x": [1.0]}, fetch_list=fetched) == [2.0]


@pytest.mark.parametrize(
    "value",
    [
        np.broadcast_to(np.float32(1), (2,)),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
        paddle.to_tensor([1.0, 1.0]),
        [1, 1.0],
    ],
    ids=["read-only", "requires grad", "parameter", "paddle", "list"],
)
def test_a_feed_may_be_any_array_or_tensor(value, exe, program):
    y = static.data("x", [2]) + 1
    (result,) = exe.run(program, feed={"x": value}, fetch_list=[y], return_numpy=False)
    assert type(result) is paddle.Tensor
    assert result.tolist() == [2.0, 2.0]


def test_the_default_program_is_run_if_none_is_passed(exe):
    y = static.data("x", [1]) + 1
    assert exe.run(feed={"x": np.ones(1, dtype=np.float32)}, fetch_list=[y])[0] == 2


def test_a_startup_program_returns_nothing(exe):
    assert exe.run(static.default_startup_program()) == []
    exe.close()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", np.float16),
        ("float32", np.float32),
        ("int64", np.int64),
        ("bfloat16", np.uint16),
    ],
)
def test_arrays_have_the_computed_dtype(dtype, expected, exe, program):
    y = static.data("x", [1], dtype) + 1
    feed = {"x": torch.ones(1, dtype=getattr(torch, dtype))}
    (value,) = exe.run(program, feed=feed, fetch_list=[y])
    assert value.dtype == expected


def test_return_numpy_false_returns_tensors(exe, program):
    y = static.data("x", [1]) + 1
    assert torch.equal(
        exe.run(program, feed={"x": torch.ones(1)}, fetch_list=[y], return_numpy=False)[0],
        torch.full((1,), 2.0),
    )


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (
            lambda exe, program: exe.run(program, feed={"z": 1}, fetch_list=["x"]),
            ValueError,
            r"The feed has 'z', and the program has no static.data of that name: x",
        ),
        (
            lambda exe, program: exe.run(program, feed={"x": torch.ones(3)}, fetch_list=["x"]),
            ValueError,
            (
                r"The fed Variable 'x' should have dimensions = 2, shape = \[-1, 4\], but received"
                r" fed shape \[3\]"
            ),
        ),
        (
            lambda exe, program: exe.run(program, feed={"x": torch.ones(3, 5)}, fetch_list=["x"]),
            ValueError,
            r"shape = \[-1, 4\], but received fed shape \[3, 5\]",
        ),
        (
            lambda exe, program: exe.run(
                program, feed={"x": torch.ones(3, 4).long()}, fetch_list=["x"]
            ),
            ValueError,
            "The data type of fed Variable 'x' must be float32, but received int64",
        ),
        (
            lambda exe, program: exe.run(program, feed={}, fetch_list=["x"]),
            ValueError,
            "The program needs 'x', which was not fed",
        ),
        (
            lambda exe, program: exe.run(program, feed=[torch.ones(3, 4)], fetch_list=["x"]),
            TypeError,
            r"feed requires dict as its Parameter.*But you passed in list",
        ),
        (
            lambda exe, program: exe.run(program, feed={"x": "data"}, fetch_list=["x"]),
            TypeError,
            "The feed of 'x' should be an array, a tensor or a list of numbers, but received str",
        ),
        (
            lambda exe, program: exe.run(
                program, feed={"x": program.variable("x")}, fetch_list=["x"]
            ),
            TypeError,
            "The feed of 'x' is the variable 'x', which has no value",
        ),
        (
            lambda exe, program: exe.run(program, fetch_list=["y"]),
            ValueError,
            "The program has no variable 'y'. Its feeds are x",
        ),
        (
            lambda exe, program: exe.run(program, fetch_list=[torch.ones(1)]),
            TypeError,
            "fetch_list should have variables of the program or their names.*received Tensor",
        ),
        (
            lambda exe, program: exe.run(static.Program(), fetch_list=[program.variable("x")]),
            ValueError,
            "The variable 'x' belongs to another program",
        ),
        (
            lambda exe, _: exe.run("main"),
            TypeError,
            "Executor requires Program as its Parameter. But you passed in str",
        ),
    ],
    ids=[
        "name",
        "dimensions",
        "size",
        "dtype",
        "missing",
        "list",
        "str",
        "variable",
        "fetch",
        "tensor",
        "other",
        "program",
    ],
)
def test_invalid_feeds_and_programs_raise(run, error, message, exe, program):
    static.data("x", [-1, 4])
    with pytest.raises(error, match=message):
        run(exe, program)


def test_a_test_clone_evaluates_in_the_precision_of_training_without_training(exe, program):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    out = model(static.data("x", [-1, 4]))
    test_program = program.clone(for_test=True)
    optimizer = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()), level="O2"
    )
    optimizer.minimize(out.square().mean())
    feed = {"x": np.ones((2, 4), dtype=np.float32)}
    exe.run(program, feed=feed)
    before = model[0].weight.detach().clone()
    (value,) = exe.run(test_program, feed=feed, fetch_list=[out])
    assert value.dtype == np.float16
    assert torch.equal(model[0].weight, before)
    assert value == pytest.approx(model.eval()(torch.ones(2, 4).half()).detach().numpy())


def test_an_executor_has_its_place_and_a_global_scope():
    assert static.Executor(paddle.CPUPlace()).place == paddle.CPUPlace()
    assert isinstance(static.global_scope(), static.Scope)


class Reshape(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x):
        x = x.view(x.shape[0], -1)
        return self.linear(torch.cat([x, x[:, :0]], dim=1)).transpose(0, 1)


class InPlace(nn.Module):
    def forward(self, x):
        y = x + 1
        y[:, 0] = 7.0
        y.mul_(2)
        return y


MODELS = {
    "linear": (nn.Linear(4, 2), (3, 4)),
    "convolution": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4).eval(),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        (2, 3, 8, 8),
    ),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "recurrent": (nn.LSTM(4, 4, batch_first=True), (2, 5, 4)),
    "reshapes": (Reshape(), (5, 2, 3)),
    "in place": (InPlace(), (2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_program_computes_what_the_model_computes(name, program):
    model, shape = MODELS[name]
    value = torch.randn(shape)
    x = static.data("x", list(shape))
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    expected = model(value)
    expected = expected[0] if isinstance(expected, tuple) else expected
    (result,) = run_nodes(program.needed_for([out]), {x: value}, [out])
    assert torch.equal(result, expected)


def test_an_unknown_size_takes_the_size_of_the_feed(program):
    x, y = static.data("x", [-1, 2, 3]), static.data("y", [-1, -1, 2])
    out, flat = Reshape()(x), y.reshape(y.shape[0] * y.shape[1], 2)
    for batch in (1, 7):
        values = run_nodes(
            program.nodes, {x: torch.ones(batch, 2, 3), y: torch.ones(batch, 5, 2)}, [out, flat]
        )
        assert [value.shape for value in values] == [(2, batch), (5 * batch, 2)]


def test_dropout_and_batch_norm_evaluate_in_eval_mode(program):
    norm = nn.BatchNorm1d(2)
    x = static.data("x", [4, 2])
    out = F.dropout(norm(x), 0.5)
    value = torch.randn(4, 2)
    (result,) = run_nodes(program.nodes, {x: value}, [out], call_in_eval)
    assert torch.equal(result, norm.eval()(value))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_program_for_a_gpu_runs_on_the_cpu_with_one_warning(program, monkeypatch):
    monkeypatch.setattr(_places, "_warned", set())
    model, place = paddle.nn.Linear(4, 1), paddle.CUDAPlace(0)
    loss = model(static.data("x", [-1, 4])).square().mean()
    optimizer = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()),
        level="O2",
        init_loss_scaling=8.0,
    )
    optimizer.minimize(loss)
    feed = {"x": paddle.to_tensor(np.ones((2, 4), "float32"))}
    with pytest.warns(UserWarning, match=r"CUDAPlace\(0\) is used .*Place\(cpu\) is used instead"):
        exe = static.Executor(place)
    optimizer.amp_init(place, scope=static.global_scope())
    feed["x"]._to(place)
    losses = [
        exe.run(program, feed=feed, fetch_list=[loss], use_program_cache=True)[0] for _ in range(3)
    ]
    assert losses[0].dtype == np.float16
    assert losses[-1] < losses[0]
