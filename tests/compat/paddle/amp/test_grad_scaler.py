"""`paddle.amp.GradScaler` and `AmpScaler`: behaviour that Paddle's recorded traces do not cover."""

from __future__ import annotations

import warnings
from io import BytesIO

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle.amp._scaler_parameters import ScalerParameters

INF = float("inf")


class Training:
    """One weight and its optimizer."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(1))
        self.optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=[self.weight])

    def backward(self, scaler, factor=1.0):
        scaler.scale((self.weight * factor).sum()).backward()


@pytest.fixture
def training():
    return Training()


@pytest.mark.parametrize(
    ("scaler_class", "expected"),
    [(paddle.amp.GradScaler, (65536.0, 2000, 1)), (paddle.amp.AmpScaler, (32768.0, 1000, 1))],
    ids=["GradScaler", "AmpScaler"],
)
def test_defaults_are_those_of_paddle_3(scaler_class, expected):
    scaler = scaler_class()
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


def test_a_non_finite_step_is_skipped_and_a_plain_step_works_after_it(training):
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


def test_each_optimizer_is_skipped_by_its_own_gradients_only():
    skipped, stepped = Training(), Training()
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    skipped.backward(scaler, INF)
    stepped.backward(scaler)
    for training in (skipped, stepped):
        scaler.unscale_(training.optimizer)
    for training in (skipped, stepped):
        scaler.step(training.optimizer)
    scaler.update()
    assert (skipped.weight.item(), stepped.weight.item(), scaler.state_dict()["scale"].item()) == (
        1.0,
        0.0,
        4.0,
    )


@pytest.mark.parametrize("skipped", [0, 1])
def test_several_losses_with_their_own_scalers_keep_their_scales(skipped):
    trainings = [Training(), Training()]
    scalers = [paddle.amp.GradScaler(init_loss_scaling=scale) for scale in (8.0, 32.0)]
    factors = [1.0, 1.0]
    factors[skipped] = INF
    scaled = [
        scaler.scale((training.weight * factor).sum())
        for scaler, training, factor in zip(scalers, trainings, factors, strict=True)
    ]
    # One backward for both: each gradient has the scale of its own loss.
    (scaled[0] + scaled[1]).backward()
    for scaler, training in zip(scalers, trainings, strict=True):
        scaler.minimize(training.optimizer, scaled)
    expected = [8.0, 32.0]
    expected[skipped] /= 2
    assert [scaler.state_dict()["scale"].item() for scaler in scalers] == expected
    assert trainings[skipped].weight.item() == 1.0
    assert trainings[1 - skipped].weight.item() == 0.0


def test_unscale_unscales_gradients_in_place(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    training.backward(scaler, 3.0)
    assert training.weight.grad.item() == 24.0
    scaler.unscale_(training.optimizer)
    assert training.weight.grad.item() == 3.0


def test_a_fixed_scale_needs_no_update_and_skips_non_finite_steps(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    for factor in (1.0, INF, 1.0):
        training.backward(scaler, factor)
        scaler.step(training.optimizer)
        training.optimizer.clear_grad()
    assert training.weight.item() == -1.0
    scaler.update()
    assert scaler.state_dict()["scale"].item() == 8.0


def test_minimize_steps_updates_and_returns_parameters_with_gradients(training):
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
def test_calls_out_of_order_raise(calls, message, training):
    scaler = paddle.amp.GradScaler()
    training.backward(scaler)
    first, second = calls
    getattr(scaler, first)(training.optimizer)
    with pytest.raises(RuntimeError, match=message):
        getattr(scaler, second)(training.optimizer)


def test_an_update_without_a_step_raises(training):
    scaler = paddle.amp.GradScaler()
    training.backward(scaler)
    with pytest.raises(RuntimeError, match="found no gradients that were checked"):
        scaler.update()


def test_a_bfloat16_loss_disables_dynamic_scaling_with_paddles_warning():
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


def test_gradients_of_several_batches_accumulate(training):
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    for _ in range(3):
        training.backward(scaler)
    scaler.step(training.optimizer)
    scaler.update()
    assert (training.weight.item(), scaler.state_dict()["incr_count"]) == (-2.0, 1)


SETTINGS = {
    "incr_ratio": 3.0,
    "decr_ratio": 0.25,
    "incr_every_n_steps": 7,
    "decr_every_n_nan_or_inf": 4,
    "init_loss_scaling": 12.0,
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("enable", [True, False], ids=["enabled", "disabled"])
def test_a_getter_returns_what_was_set(name, enable):
    scaler = paddle.amp.GradScaler(enable=enable)
    getattr(scaler, f"set_{name}")(SETTINGS[name])
    assert getattr(scaler, f"get_{name}")() == SETTINGS[name]


def run_steps(scaler, *factors):
    weight = nn.Parameter(torch.ones(1))
    optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=[weight])
    for factor in factors:
        scaler.scale((weight * factor).sum()).backward()
        scaler.minimize(optimizer)
        optimizer.clear_grad()


def test_a_setting_applies_to_the_next_step():
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    scaler.set_incr_every_n_steps(2)
    scaler.set_incr_ratio(3.0)
    run_steps(scaler, 1.0, 1.0)
    assert scaler._scale.item() == 24.0
    scaler.set_decr_every_n_nan_or_inf(2)
    scaler.set_decr_ratio(0.25)
    run_steps(scaler, INF)
    assert (scaler._scale.item(), scaler._decr_count) == (24.0, 1)
    run_steps(scaler, INF)
    assert (scaler._scale.item(), scaler._decr_count) == (6.0, 0)


def test_setting_the_scale_keeps_the_counters():
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    run_steps(scaler, 1.0, 1.0)
    scaler.set_init_loss_scaling(2.0)
    assert (scaler._scale.item(), scaler._incr_count) == (2.0, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("incr_ratio", 1.0, "The new_incr_ratio must be > 1.0"),
        ("decr_ratio", 2.0, "The new_decr_ratio must be < 1.0"),
    ],
)
def test_setting_an_invalid_ratio_raises(name, value, message):
    with pytest.raises(AssertionError, match=message):
        getattr(paddle.amp.GradScaler(), f"set_{name}")(value)


def test_a_disabled_scaler_has_a_scale_of_one():
    scaler = paddle.amp.GradScaler(enable=False)
    assert (scaler._scale.item(), scaler._incr_count, scaler._decr_count, scaler._found_inf) == (
        1.0,
        0,
        0,
        False,
    )


PARAMETERS = {
    "init_loss_scaling": 100.0,
    "incr_ratio": 1.5,
    "decr_ratio": 0.7,
    "incr_every_n_steps": 4,
    "decr_every_n_nan_or_inf": 3,
    "use_dynamic_loss_scaling": True,
}
SAVED = {
    "scale": np.array([12.0], dtype=np.float32),
    "incr_ratio": 1.5,
    "decr_ratio": 0.7,
    "incr_every_n_steps": 4,
    "decr_every_n_nan_or_inf": 3,
    "incr_count": 2,
    "decr_count": 1,
    "use_dynamic_loss_scaling": True,
}


def test_a_state_dict_has_paddles_entries():
    state = paddle.amp.GradScaler(**PARAMETERS).state_dict()
    assert state.keys() == SAVED.keys()
    assert (state["scale"].dtype, state["scale"].tolist()) == (torch.float32, [100.0])


@pytest.mark.parametrize(
    "scale", [SAVED["scale"], torch.tensor([12.0]), 12.0], ids=["array", "tensor", "number"]
)
def test_every_field_of_a_state_dict_that_paddle_saved_is_loaded(scale):
    scaler = paddle.amp.GradScaler()
    scaler.load_state_dict({**SAVED, "scale": scale})
    state = scaler.state_dict()
    assert {**state, "scale": state["scale"].tolist()} == {**SAVED, "scale": [12.0]}
    assert scaler.get_init_loss_scaling() == 12.0


def test_a_state_dict_can_be_loaded_with_weights_only():
    file = BytesIO()
    torch.save(paddle.amp.GradScaler(**PARAMETERS).state_dict(), file)
    file.seek(0)
    scaler = paddle.amp.GradScaler()
    scaler.load_state_dict(torch.load(file, weights_only=True))
    assert scaler.get_incr_every_n_steps() == 4


def test_an_empty_state_dict_raises():
    with pytest.raises(
        RuntimeError,
        match=(
            "The input state dict is empty, possibly because it was saved from a disabled instance"
            " of GradScaler"
        ),
    ):
        paddle.amp.GradScaler().load_state_dict({})


def test_a_missing_entry_raises_and_changes_nothing():
    scaler = paddle.amp.GradScaler()
    with pytest.raises(KeyError, match="incr_count"):
        scaler.load_state_dict(
            {name: value for name, value in SAVED.items() if name != "incr_count"}
        )
    assert scaler.state_dict()["scale"].item() == 65536.0


def test_a_disabled_scaler_ignores_a_state_dict():
    scaler = paddle.amp.GradScaler(enable=False)
    scaler.load_state_dict(SAVED)
    assert scaler.state_dict() == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"incr_ratio": 1.0}, "The incr_ratio must be > 1.0"),
        ({"decr_ratio": 1.0}, "The decr_ratio must be < 1.0"),
    ],
    ids=str,
)
def test_constructing_with_an_invalid_ratio_raises(kwargs, message):
    with pytest.raises(AssertionError, match=message):
        paddle.amp.GradScaler(**kwargs)


def test_the_rule_has_every_parameter():
    rule = ScalerParameters(*PARAMETERS.values(), min_scale=1.0).rule
    assert (
        rule.growth_factor,
        rule.growth_interval,
        rule.backoff_interval,
        rule.dynamic,
        rule.min_scale,
    ) == (1.5, 4, 3, True, 1.0)
    assert rule.backoff_factor == pytest.approx(0.7)


OPTIONS = ("init_loss_scaling", "incr_ratio", "decr_ratio")


@pytest.mark.parametrize("value", ["2", [2.0], None], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_no_number_raises(name, value):
    with pytest.raises(TypeError, match=rf"{name}=.* is .*\. It should be a number"):
        paddle.amp.GradScaler(**{name: value})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"init_loss_scaling": 0}, "The init_loss_scaling must be a positive finite number"),
        ({"init_loss_scaling": float("nan")}, "It is nan"),
        ({"incr_every_n_steps": "1000"}, "The incr_every_n_steps must be a number of steps, 0 or"),
        ({"incr_every_n_steps": 0.5}, "It is 0.5"),
        ({"decr_every_n_nan_or_inf": -1}, "The decr_every_n_nan_or_inf must be a number of steps"),
    ],
    ids=str,
)
def test_an_invalid_option_raises_under_paddles_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        paddle.amp.GradScaler(**kwargs)


@pytest.mark.parametrize("method", ["step", "unscale_", "minimize"])
@pytest.mark.parametrize(
    "value", [None, nn.Linear(1, 1), torch.ones(1)], ids=lambda v: type(v).__name__
)
def test_something_else_than_an_optimizer_raises(method, value):
    scaler = paddle.amp.GradScaler()
    message = rf"{method}\(\) takes an optimizer, but received {type(value).__name__}"
    with pytest.raises(TypeError, match=message):
        getattr(scaler, method)(value)


def test_an_incomplete_state_dict_raises_and_names_what_is_missing():
    scaler = paddle.amp.GradScaler()
    state = scaler.state_dict()
    del state["incr_ratio"]
    with pytest.raises(KeyError, match=r"The state dict has no incr_ratio. Pass what"):
        scaler.load_state_dict(state)
    with pytest.raises(TypeError, match=r"takes what state_dict.* returned, but received str"):
        scaler.load_state_dict("state")
