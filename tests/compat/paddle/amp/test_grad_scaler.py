"""Scalers in Paddle's words, where no trace speaks of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from mezzo.compat import paddle

INF = float("inf")


class Training:
    """One weight, one optimizer."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(1))
        self.optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=[self.weight])

    def backward(self, scaler, factor=1.0):
        scaler.scale((self.weight * factor).sum()).backward()


@pytest.fixture
def training():
    return Training()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(paddle.amp.GradScaler, (65536.0, 2000, 1)), (paddle.amp.AmpScaler, (32768.0, 1000, 1))],
    ids=["GradScaler", "AmpScaler"],
)
def test_defaults_are_those_of_the_last_version(kind, expected):
    scaler = kind()
    assert (
        scaler.get_init_loss_scaling(),
        scaler.get_incr_every_n_steps(),
        scaler.get_decr_every_n_nan_or_inf(),
    ) == expected
    assert (
        scaler.get_incr_ratio(),
        scaler.get_decr_ratio(),
        scaler.is_use_dynamic_loss_scaling(),
        scaler.is_enable(),
    ) == (2.0, 0.5, True, True)


def test_a_float16_loss_is_scaled_in_float32():
    assert paddle.amp.GradScaler().scale(torch.tensor(2.0, dtype=torch.float16)).item() == 131072.0


def test_a_bad_step_is_skipped_and_a_plain_step_works_after_it(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    training.backward(scaler, INF)
    scaler.step(training.optimizer)
    scaler.update()
    assert (training.weight.item(), scaler.state_dict()["scale"].item(), scaler._found_inf) == (
        1.0,
        4.0,
        True,
    )
    training.optimizer.clear_grad()
    training.weight.sum().backward()
    training.optimizer.step()
    assert training.weight.item() == 0.0


def test_each_optimizer_is_skipped_by_its_own_gradients():
    one, other, scaler = Training(), Training(), paddle.amp.GradScaler(init_loss_scaling=8.0)
    one.backward(scaler, INF)
    other.backward(scaler)
    for each in (one, other):
        scaler.unscale_(each.optimizer)
    for each in (one, other):
        scaler.step(each.optimizer)
    scaler.update()
    assert (one.weight.item(), other.weight.item(), scaler.state_dict()["scale"].item()) == (
        1.0,
        0.0,
        4.0,
    )


def test_unscaled_gradients_can_be_looked_at(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    training.backward(scaler, 3.0)
    assert training.weight.grad.item() == 24.0
    scaler.unscale_(training.optimizer)
    assert training.weight.grad.item() == 3.0


def test_a_fixed_scale_needs_no_update_and_skips_too(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    for factor in (1.0, INF, 1.0):
        training.backward(scaler, factor)
        scaler.step(training.optimizer)
        training.optimizer.clear_grad()
    assert training.weight.item() == -1.0
    scaler.update()
    assert scaler.state_dict()["scale"].item() == 8.0


def test_minimize_steps_and_updates_and_gives_what_it_used(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    scaled = scaler.scale(training.weight.sum())
    scaled.backward()
    _, pairs = scaler.minimize(training.optimizer, scaled)
    assert [(parameter is training.weight, gradient.item()) for parameter, gradient in pairs] == [
        (True, 1.0)
    ]
    assert (training.weight.item(), scaler.state_dict()["incr_count"]) == (0.0, 1)


def test_a_disabled_scaler_passes_everything_through(training):
    scaler, loss = paddle.amp.GradScaler(enable=False), training.weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(training.optimizer)
    scaler.minimize(training.optimizer, loss)
    assert (training.weight.item(), scaler.is_enable(), scaler.state_dict()) == (0.0, False, {})


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            ("unscale_", "unscale_"),
            r"unscale_\(\) has already been called on this optimizer since the last update\(\)",
        ),
        (("step", "unscale_"), r"unscale_\(\) is being called after step\(\)"),
        (("step", "step"), r"step\(\) has already been called since the last update\(\)"),
        (("step", "minimize"), r"step\(\) has already been called since the last update\(\)"),
    ],
    ids=str,
)
def test_calls_out_of_order_are_refused(calls, message, training):
    scaler = paddle.amp.GradScaler()
    training.backward(scaler)
    first, second = calls
    getattr(scaler, first)(training.optimizer)
    with pytest.raises(RuntimeError, match=message):
        getattr(scaler, second)(training.optimizer)


def test_an_update_without_a_step_is_refused(training):
    scaler = paddle.amp.GradScaler()
    training.backward(scaler)
    with pytest.raises(RuntimeError, match="found no gradients that were checked"):
        scaler.update()


def test_a_loss_of_bfloat16_ends_dynamic_scaling_with_paddles_warning():
    model, scaler = nn.Linear(2, 1), paddle.amp.GradScaler()
    with paddle.amp.auto_cast(dtype="bfloat16"):
        loss = model(torch.ones(1, 2)).sum()
    with pytest.warns(
        UserWarning,
        match=(
            "not recommended to use dynamic loss scaling for bfloat16, so GradScaler is disable by"
            " default"
        ),
    ):
        assert scaler.scale(loss) is loss
    assert not scaler.is_enable()


def test_a_fixed_scale_is_kept_for_bfloat16():
    model, scaler = (
        nn.Linear(2, 1),
        paddle.amp.GradScaler(init_loss_scaling=4.0, use_dynamic_loss_scaling=False),
    )
    with paddle.amp.auto_cast(dtype="bfloat16"):
        loss = model(torch.ones(1, 2)).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scaler.scale(loss).item() == 4.0 * loss.item()


def test_gradients_of_several_batches_add_up(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    for _ in range(3):
        training.backward(scaler)
    scaler.step(training.optimizer)
    scaler.update()
    assert (training.weight.item(), scaler.state_dict()["incr_count"]) == (-2.0, 1)
