"""Feeds, fetches and their dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static


def test_what_is_fetched_comes_in_order_by_name_or_by_itself(exe, program):
    x = static.data("x", [-1])
    double = x * 2
    assert [
        value.tolist()
        for value in exe.run(program, feed={"x": [1.0, 2.0]}, fetch_list=["x", double, double.name])
    ] == [[1, 2], [2, 4], [2, 4]]


def test_the_default_program_is_run_without_one(exe):
    y = static.data("x", [1]) + 1
    assert exe.run(feed={"x": np.ones(1, dtype=np.float32)}, fetch_list=[y])[0] == 2


def test_a_startup_program_has_nothing_to_do(exe):
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
def test_arrays_have_the_dtype_that_was_computed(dtype, expected, exe, program):
    y = static.data("x", [1], dtype) + 1
    assert (
        exe.run(program, feed={"x": torch.ones(1, dtype=getattr(torch, dtype))}, fetch_list=[y])[
            0
        ].dtype
        == expected
    )


def test_tensors_come_back_where_arrays_are_not_wanted(exe, program):
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
            "The data type of fed Variable 'x' must be torch.float32, but received torch.int64",
        ),
        (
            lambda exe, program: exe.run(program, feed={}, fetch_list=["x"]),
            ValueError,
            "The program needs 'x', which was not fed",
        ),
        (
            lambda exe, _: exe.run("main"),
            TypeError,
            "Executor requires Program as its Parameter. But you passed in str",
        ),
    ],
    ids=["name", "dimensions", "size", "dtype", "missing", "program"],
)
def test_what_is_refused(run, error, message, exe, program):
    static.data("x", [-1, 4])
    with pytest.raises(error, match=message):
        run(exe, program)


def test_a_clone_for_testing_evaluates_in_the_precision_of_training_and_does_not_train(
    exe, program
):
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


def test_a_place_is_where_it_runs():
    assert static.Executor(paddle.CPUPlace()).place == paddle.CPUPlace()
    assert isinstance(static.global_scope(), static.Scope)
