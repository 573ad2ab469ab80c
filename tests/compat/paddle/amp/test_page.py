"""Differences from Paddle that the page lists and no other test of the dialect shows."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle import static

HALF, FULL = torch.float16, torch.float32
X = torch.ones(1, 4, 4, 4)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: F.conv2d(X, torch.ones(4, 4, 1, 1), torch.ones(4)), HALF),
        (lambda: F.conv2d(X, torch.ones(4, 1, 1, 1), groups=4), HALF),
        (lambda: F.max_pool2d(X, 2, return_indices=True)[0], FULL),
        (lambda: F.max_pool2d(X.half(), 2, return_indices=True)[0], HALF),
    ],
    ids=["bias", "groups", "pool", "half pool"],
)
def test_convolutions_are_16_bit_and_pooling_with_indices_is_in_no_list(call, dtype):
    with paddle.amp.auto_cast():
        assert call().dtype is dtype


def test_a_float16_tensor_is_not_recast_under_bfloat16():
    with paddle.amp.auto_cast(dtype="bfloat16"):
        assert X.half().relu().dtype is HALF


def test_an_in_place_op_keeps_its_tensors_dtype():
    x = torch.ones(2, dtype=HALF)
    with paddle.amp.auto_cast(custom_black_list={"elementwise_add"}):
        assert x.add_(1.0).dtype is HALF


def test_a_weight_that_is_used_twice_is_cast_once():
    weight = nn.Parameter(torch.ones(4, 4))
    with paddle.amp.auto_cast():
        (F.linear(X, weight) + F.linear(X, weight)).sum()
        assert mezzo.weight_cache_info().hits == 1


def test_op_lists_belong_to_the_thread():
    dtypes = []
    with paddle.amp.auto_cast(custom_white_list={"elementwise_add"}):
        thread = threading.Thread(target=lambda: dtypes.append((X + X).dtype))
        thread.start()
        thread.join()
        assert (X + X).dtype is HALF
    assert dtypes == [FULL]


def test_a_norm_whose_own_parameters_have_two_dtypes_raises_torchs_error():
    norm = nn.LayerNorm(4)
    norm.bias.data = norm.bias.data.half()
    with paddle.amp.auto_cast(level="O2"), pytest.raises(RuntimeError, match="type"):
        norm(X.half())


def test_optimizers_made_after_decorate_compute_in_float32_if_they_are_paddles():
    model = paddle.amp.decorate(models=nn.Linear(2, 1, bias=False), level="O2")
    model.weight.grad = torch.ones_like(model.weight)
    optimizers = (
        paddle.optimizer.Adam(parameters=model.parameters()),
        torch.optim.Adam(model.parameters()),
    )
    for optimizer, dtype in zip(optimizers, (FULL, HALF), strict=True):
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].dtype is dtype


def test_the_gradients_of_a_skipped_step_stay_unscaled():
    weight = nn.Parameter(torch.ones(2))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=[weight])
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    scaler.scale((weight * torch.tensor([1.0, float("inf")])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.detach().tolist() == [1.0, 1.0]
    assert weight.grad.tolist() == [1.0, float("inf")]


@pytest.mark.parametrize(
    ("kwargs", "count", "message"),
    [
        ({}, 142, "The loss scale is at its floor of 1.17549e-38"),
        ({"decr_every_n_nan_or_inf": 0}, 1000, "1000"),
    ],
    ids=["at the floor", "without backing off"],
)
def test_skipping_warns_at_the_smallest_scale_or_after_1000_steps(kwargs, count, message):
    weight = nn.Parameter(torch.ones(1))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=[weight])
    scaler = paddle.amp.GradScaler(**kwargs)

    def skip() -> None:
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(count - 1):
        skip()
    with pytest.warns(UserWarning, match=message):
        skip()
    assert scaler.state_dict()["scale"].item() > 0.0


def test_the_loss_scale_of_a_static_program_is_at_least_one():
    program = static.Program()
    with static.program_guard(program, static.Program()):
        layer = paddle.nn.Linear(4, 1)
        loss = layer(static.data("x", [-1, 4])).mean()
        optimizer = static.amp.decorate(
            paddle.optimizer.SGD(learning_rate=0.1, parameters=layer.parameters()),
            init_loss_scaling=2.0,
        )
        optimizer.minimize(loss)
    exe = static.Executor(paddle.CPUPlace())
    feed = {"x": np.full((2, 4), np.inf, "float32")}
    with pytest.warns(UserWarning, match="The loss scale is at its floor of 1"):
        exe.run(program, feed=feed)
    exe.run(program, feed=feed)
    assert optimizer.get_loss_scaling() == 1.0
