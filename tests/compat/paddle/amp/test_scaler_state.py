"""What a scaler saves, and from whom it loads."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle.amp._grad_scaler import ScalerParameters

WORDS = {
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


def test_a_state_has_paddles_entries():
    state = paddle.amp.GradScaler(**WORDS).state_dict()
    assert state.keys() == SAVED.keys()
    assert (state["scale"].dtype, state["scale"].tolist()) == (torch.float32, [100.0])


@pytest.mark.parametrize(
    "scale", [SAVED["scale"], torch.tensor([12.0]), 12.0], ids=["array", "tensor", "number"]
)
def test_every_field_comes_back_from_a_state_that_paddle_saved(scale):
    scaler = paddle.amp.GradScaler()
    scaler.load_state_dict({**SAVED, "scale": scale})
    state = scaler.state_dict()
    assert {**state, "scale": state["scale"].tolist()} == {**SAVED, "scale": [12.0]}
    assert scaler.get_init_loss_scaling() == 12.0


def test_a_state_goes_through_a_file_that_is_read_safely():
    file = BytesIO()
    torch.save(paddle.amp.GradScaler(**WORDS).state_dict(), file)
    file.seek(0)
    scaler = paddle.amp.GradScaler()
    scaler.load_state_dict(torch.load(file, weights_only=True))
    assert scaler.get_incr_every_n_steps() == 4


def test_an_empty_state_is_refused():
    with pytest.raises(
        RuntimeError,
        match=(
            "The input state dict is empty, possibly because it was saved from a disabled instance"
            " of GradScaler"
        ),
    ):
        paddle.amp.GradScaler().load_state_dict({})


def test_a_state_that_lacks_an_entry_is_refused_and_changes_nothing():
    scaler = paddle.amp.GradScaler()
    with pytest.raises(KeyError, match="incr_count"):
        scaler.load_state_dict(
            {name: value for name, value in SAVED.items() if name != "incr_count"}
        )
    assert scaler.state_dict()["scale"].item() == 65536.0


def test_a_disabled_scaler_takes_any_state():
    scaler = paddle.amp.GradScaler(enable=False)
    scaler.load_state_dict(SAVED)
    assert scaler.state_dict() == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"incr_ratio": 1.0}, "The incr_ratio must be > 1.0"),
        ({"decr_ratio": 1.0}, "The decr_ratio must be < 1.0"),
    ],
    ids=str,
)
def test_ratios_that_go_the_wrong_way_are_refused(words, message):
    with pytest.raises(AssertionError, match=message):
        paddle.amp.GradScaler(**words)


def test_the_rule_has_every_word():
    rule = ScalerParameters(*WORDS.values(), min_scale=1.0).rule
    assert (
        rule.growth_factor,
        rule.growth_interval,
        rule.backoff_interval,
        rule.dynamic,
        rule.min_scale,
    ) == (1.5, 4, 3, True, 1.0)
    assert rule.backoff_factor == pytest.approx(0.7)
