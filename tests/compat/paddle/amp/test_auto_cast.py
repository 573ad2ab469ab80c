"""`auto_cast` in Paddle's words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle

ONES = torch.ones(2, 2)


def product() -> torch.dtype:
    return (ONES @ ONES).dtype


def addition() -> torch.dtype:
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
def test_levels(level, matmul, add, softmax):
    half = ONES.half()
    with paddle.amp.auto_cast(level=level):
        assert (product(), addition()) == (matmul, add)
        assert torch.softmax(half, -1).dtype is (softmax if level != "O0" else torch.float16)


@pytest.mark.parametrize("level", ["o1", "od"])
def test_a_level_in_small_letters(level):
    with paddle.amp.auto_cast(level=level):
        assert product() is torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "BFLOAT16", torch.bfloat16], ids=str)
def test_bfloat16(dtype):
    with paddle.amp.auto_cast(dtype=dtype):
        assert product() is torch.bfloat16


def test_custom_lists_speak_paddles_names():
    with paddle.amp.auto_cast(
        custom_white_list={"elementwise_add"}, custom_black_list=["matmul_v2"]
    ):
        assert (product(), addition()) == (torch.float32, torch.float16)


def test_without_promotion_o2_is_16_bit_but_for_the_black_list():
    with paddle.amp.auto_cast(level="O2", use_promote=False):
        assert addition() is torch.float16
        assert nn.functional.embedding(torch.tensor([0]), ONES.half()).dtype is torch.float32


def test_without_promotion_o1_is_as_with_it():
    with paddle.amp.auto_cast(level="O1", use_promote=False):
        assert addition() is torch.float32


def test_it_decorates_a_function():
    assert paddle.amp.auto_cast(dtype="bfloat16")(product)() is torch.bfloat16


def test_an_inner_region_replaces_the_outer_ones_lists_and_gives_them_back():
    with paddle.amp.auto_cast(custom_white_list={"elementwise_add"}):
        with paddle.amp.auto_cast():
            assert addition() is torch.float32
        with paddle.amp.auto_cast(enable=False):
            assert product() is torch.float32
        assert addition() is torch.float16


def test_the_outer_state_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), paddle.amp.auto_cast():
        1 / 0  # noqa: B018
    assert product() is torch.float32
    assert not paddle.amp.is_autocast_enabled()


def test_gradients_of_float32_parameters_are_float32():
    weight = nn.Parameter(torch.ones(2, 2))
    with paddle.amp.auto_cast():
        (ONES @ weight).sum().backward()
    assert weight.grad.dtype is torch.float32


def test_a_region_that_is_off_takes_any_dtype():
    with paddle.amp.auto_cast(enable=False, dtype="float32"):
        assert product() is torch.float32


def test_amp_guard_is_the_same():
    assert paddle.amp.amp_guard is paddle.amp.auto_cast


def test_the_state_can_be_asked_for():
    assert (paddle.amp.is_autocast_enabled(), paddle.amp.get_autocast_dtype()) == (False, "float16")
    with paddle.amp.auto_cast(dtype="bfloat16"):
        assert (paddle.amp.is_autocast_enabled(), paddle.amp.get_autocast_dtype()) == (
            True,
            "bfloat16",
        )
    with paddle.amp.autocast("gpu", enabled=False):
        assert not paddle.amp.is_autocast_enabled()


@pytest.mark.parametrize(
    ("words", "matmul", "add"),
    [
        ({"custom_white_list": {"elementwise_add"}}, torch.float16, torch.float16),
        ({"custom_black_list": {"matmul_v2"}, "dtype": "bfloat16"}, torch.float32, torch.float32),
        ({"level": "O2", "use_promote": False}, torch.float16, torch.float16),
        ({"level": "O0"}, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_inside_a_compiled_function_it_is_as_outside(words, matmul, add):
    torch._dynamo.reset()

    def run(x):
        with paddle.amp.auto_cast(**words):
            return x @ x, x + x

    for function in (run, torch.compile(run, backend="eager", fullgraph=True)):
        assert [one.dtype for one in function(ONES)] == [matmul, add]


def test_the_same_words_make_one_region():
    one, other = (
        paddle.amp.auto_cast(custom_white_list=names)._region
        for names in ({"elementwise_add"}, ["elementwise_add"])
    )
    assert one is other
    assert one is not paddle.amp.auto_cast()._region
