"""`paddle.amp.auto_cast`: levels, lists and state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle.amp import _auto_cast
from mezzo.compat.paddle.amp._auto_cast import custom_lists

ONES = torch.ones(2, 2)


def matmul_dtype() -> torch.dtype:
    return (ONES @ ONES).dtype


def add_dtype() -> torch.dtype:
    return (ONES + ONES).dtype


@pytest.mark.parametrize(
    ("level", "matmul", "add", "softmax"),
    [
        ("O0", torch.float32, torch.float32, torch.float32),
        ("OD", torch.float16, torch.float32, torch.float32),
        ("O1", torch.float16, torch.float32, torch.float32),
        ("O2", torch.float16, torch.float32, torch.float16),
    ],
)
def test_each_level_runs_its_ops_in_its_dtypes(level, matmul, add, softmax):
    half = ONES.half()
    with paddle.amp.auto_cast(level=level):
        assert (matmul_dtype(), add_dtype()) == (matmul, add)
        assert torch.softmax(half, -1).dtype is (softmax if level != "O0" else torch.float16)


@pytest.mark.parametrize("level", ["o1", "od"])
def test_a_level_may_be_lowercase(level):
    with paddle.amp.auto_cast(level=level):
        assert matmul_dtype() is torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "BFLOAT16", torch.bfloat16], ids=str)
def test_bfloat16_may_be_a_string_or_a_torch_dtype(dtype):
    with paddle.amp.auto_cast(dtype=dtype):
        assert matmul_dtype() is torch.bfloat16


def test_custom_lists_take_paddles_op_names():
    with paddle.amp.auto_cast(
        custom_white_list={"elementwise_add"}, custom_black_list=["matmul_v2"]
    ):
        assert (matmul_dtype(), add_dtype()) == (torch.float32, torch.float16)


def test_without_promotion_o2_runs_all_but_the_black_list_in_16_bits():
    with paddle.amp.auto_cast(level="O2", use_promote=False):
        assert add_dtype() is torch.float16
        assert nn.functional.embedding(torch.tensor([0]), ONES.half()).dtype is torch.float32


def test_use_promote_has_no_effect_at_o1():
    with paddle.amp.auto_cast(level="O1", use_promote=False):
        assert add_dtype() is torch.float32


def test_auto_cast_decorates_a_function():
    assert paddle.amp.auto_cast(dtype="bfloat16")(matmul_dtype)() is torch.bfloat16


def test_an_inner_region_replaces_the_outer_lists_until_it_exits():
    with paddle.amp.auto_cast(custom_white_list={"elementwise_add"}):
        with paddle.amp.auto_cast():
            assert add_dtype() is torch.float32
        with paddle.amp.auto_cast(enable=False):
            assert matmul_dtype() is torch.float32
        assert add_dtype() is torch.float16


def test_the_outer_state_is_restored_when_the_body_raises():
    with pytest.raises(ZeroDivisionError), paddle.amp.auto_cast():
        1 / 0  # noqa: B018
    assert matmul_dtype() is torch.float32
    assert not paddle.amp.is_autocast_enabled()


def test_gradients_of_float32_parameters_are_float32():
    weight = nn.Parameter(torch.ones(2, 2))
    with paddle.amp.auto_cast():
        (ONES @ weight).sum().backward()
    assert weight.grad.dtype is torch.float32


def test_a_disabled_region_accepts_any_dtype():
    with paddle.amp.auto_cast(enable=False, dtype="float32"):
        assert matmul_dtype() is torch.float32


def test_amp_guard_is_auto_cast():
    assert paddle.amp.amp_guard is paddle.amp.auto_cast


def test_enabled_and_dtype_can_be_queried():
    assert (paddle.amp.is_autocast_enabled(), paddle.amp.get_autocast_dtype()) == (False, "float16")
    with paddle.amp.auto_cast(dtype="bfloat16"):
        assert (paddle.amp.is_autocast_enabled(), paddle.amp.get_autocast_dtype()) == (
            True,
            "bfloat16",
        )
    with paddle.amp.autocast("gpu", enabled=False):
        assert not paddle.amp.is_autocast_enabled()


@pytest.mark.parametrize(
    ("kwargs", "matmul", "add"),
    [
        ({"custom_white_list": {"elementwise_add"}}, torch.float16, torch.float16),
        ({"custom_black_list": {"matmul_v2"}, "dtype": "bfloat16"}, torch.float32, torch.float32),
        ({"level": "O2", "use_promote": False}, torch.float16, torch.float16),
        ({"level": "O0"}, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_a_compiled_function_gives_the_dtypes_of_eager_mode(kwargs, matmul, add):
    torch._dynamo.reset()

    def run(x):
        with paddle.amp.auto_cast(**kwargs):
            return x @ x, x + x

    for function in (run, torch.compile(run, backend="eager", fullgraph=True)):
        assert [result.dtype for result in function(ONES)] == [matmul, add]


def test_equal_arguments_share_one_region():
    first, second = (
        paddle.amp.auto_cast(custom_white_list=names)._region
        for names in ({"elementwise_add"}, ["elementwise_add"])
    )
    assert first is second
    assert first is not paddle.amp.auto_cast()._region


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
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
        ({"custom_white_list": 3}, TypeError, "custom_white_list=3 should be a set of op names"),
        ({"custom_black_list": [["conv2d"]]}, TypeError, "should be a set of op names, such as"),
        ({"enable": "O1"}, TypeError, "enable='O1' is str.*a level is level='O1'"),
        ({"enable": matmul_dtype}, TypeError, r"it has brackets: @paddle.amp.auto_cast\(\)"),
        ({"level": ["O1"]}, AttributeError, r"level=\['O1'\] is list, not a string"),
    ],
)
def test_invalid_arguments_raise_paddles_exception(kwargs, error, message):
    with pytest.raises(error, match=message):
        paddle.amp.auto_cast(**kwargs)


def test_o0_does_not_check_the_lists():
    with paddle.amp.auto_cast(level="O0", custom_white_list={"b"}, custom_black_list={"b"}):
        pass


def test_an_op_that_both_lists_match_by_different_names_is_full():
    assert custom_lists({"mul"}, {"matmul_v2"}) == (set(), {"matmul", "mm", "inner", "linear"})


@pytest.mark.parametrize("name", ["matmul", "matmul_v2"])
def test_matmul_in_the_black_list_keeps_linear_layers_in_float32_too(name):
    assert "linear" in custom_lists((), {name})[1]
    assert custom_lists({"linear_v2"}, {name})[0] == {"linear"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("conv2dd", "no op that Paddle and torch share has that name. Did you mean 'conv2d'"),
        ("pnorm", "Paddle's pnorm matches no op of Paddle: the real name is p_norm"),
    ],
)
def test_a_name_without_effect_is_logged_once(name, reason, monkeypatch, caplog):
    monkeypatch.setattr(_auto_cast, "_logged_names", set())
    for _ in range(2):
        paddle.amp.auto_cast(custom_black_list={name, "exp"})
    (logged,) = caplog.messages
    assert f"'{name}' in a custom list has no effect: {reason}" in logged
