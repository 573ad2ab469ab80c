"""`CustomOpLists`."""

from __future__ import annotations

import pytest

from mezzo.compat.paddle.static.amp import AutoMixedPrecisionLists, CustomOpLists


def test_custom_names_move_between_the_lists():
    lists = CustomOpLists(
        custom_white_list=["softmax", "elementwise_add"], custom_black_list=["matmul_v2"]
    )
    assert {"softmax", "elementwise_add", "conv2d"} <= lists.white_list
    assert {"matmul_v2", "exp"} <= lists.black_list
    assert not lists.white_list & lists.black_list
    assert "elementwise_add" not in lists.gray_list
    assert "relu" in lists.gray_list
    assert lists.half >= {"softmax", "add"}


def test_both_names_are_one():
    assert CustomOpLists is AutoMixedPrecisionLists


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"custom_white_list": ["relu"], "custom_black_list": ["relu"]},
            "The given custom_white_list overlaps custom_black_list with < relu >!",
        ),
        ({"custom_black_varnames": ["w_0"]}, "variables have no names of their own here"),
        (
            {"dtype": "float32"},
            "The dtype of the lists should be 'float16' or 'bfloat16', got 'float32'",
        ),
    ],
    ids=["overlap", "names", "dtype"],
)
def test_what_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        CustomOpLists(**words)
