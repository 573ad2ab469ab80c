"""Words of Paddle's that are refused: its exception, and a message that says at least as much."""

from __future__ import annotations

import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle.amp import _auto_cast
from mezzo.compat.paddle.amp._auto_cast import custom_lists


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"level": "O3"}, ValueError, r"level should be O0, OD, O1 or O2\. It is 'O3'"),
        ({"level": "01"}, ValueError, "with a zero in place of the letter O"),
        ({"level": None}, AttributeError, "level should be O0, OD, O1 or O2"),
        (
            {"dtype": "float32"},
            ValueError,
            r"If enable amp, dtype should be 'float16' or 'bfloat16'\. It is 'float32'",
        ),
        ({"dtype": "fp16"}, ValueError, "dtype should be 'float16' or 'bfloat16'"),
        ({"dtype": torch.float64}, ValueError, "It is 'float64'"),
        ({"dtype": None}, AttributeError, "It should be the string 'float16' or 'bfloat16'"),
        (
            {"custom_white_list": ["a", "b"], "custom_black_list": {"b"}},
            ValueError,
            "Custom white list overlap custom black list: b",
        ),
        (
            {"enable": False, "custom_white_list": {"b"}, "custom_black_list": {"b"}},
            ValueError,
            "Custom white list overlap custom black list",
        ),
        (
            {"custom_white_list": "conv2d"},
            TypeError,
            r"should be a set of op names: custom_white_list=\{'conv2d'\}",
        ),
    ],
    ids=str,
)
def test_what_is_refused(words, error, message):
    with pytest.raises(error, match=message):
        paddle.amp.auto_cast(**words)


def test_o0_does_not_look_at_lists():
    with paddle.amp.auto_cast(level="O0", custom_white_list={"b"}, custom_black_list={"b"}):
        pass


def test_an_op_that_both_lists_reach_by_different_names_is_full():
    assert custom_lists({"mul"}, {"matmul_v2"}) == (set(), {"matmul", "mm", "inner", "linear"})


@pytest.mark.parametrize("name", ["matmul", "matmul_v2"])
def test_who_keeps_matmul_in_float32_keeps_linear_layers_there_too(name):
    assert "linear" in custom_lists((), {name})[1]
    assert custom_lists({"linear_v2"}, {name})[0] == {"linear"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("conv2dd", "no op of Paddle that torch has too goes by that name. Did you mean 'conv2d'"),
        ("pnorm", "Paddle's pnorm matches no op of Paddle: the real name is p_norm"),
    ],
)
def test_a_name_that_reaches_nothing_is_told_once_in_the_log(name, why, monkeypatch, caplog):
    monkeypatch.setattr(_auto_cast, "_said", set())
    for _ in range(2):
        paddle.amp.auto_cast(custom_black_list={name, "exp"})
    (told,) = caplog.messages
    assert f"'{name}' in a custom list has no effect: {why}" in told
