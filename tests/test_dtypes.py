"""Names of dtypes, and what is refused."""

import pytest
import torch

from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name, parse_dtype
from mezzo._errors import PolicyError


@pytest.mark.parametrize(
    "word", ["float16", "fp16", "half", "torch.float16", "torch.half", torch.float16, torch.half]
)
def test_every_spelling_of_float16_is_read(word):
    assert parse_dtype(word) is torch.float16


@pytest.mark.parametrize("word", ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16])
def test_every_spelling_of_bfloat16_is_read(word):
    assert parse_dtype(word) is torch.bfloat16


@pytest.mark.parametrize("word", ["float32", "fp32", "float", "torch.float32", torch.float32])
def test_float32_is_read_where_it_is_allowed(word):
    assert parse_dtype(word, allowed=(torch.float32,)) is torch.float32


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_name_is_what_torch_calls_it_without_the_module(dtype):
    assert getattr(torch, dtype_name(dtype)) is dtype


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("int8", "'int8'"),
        ("", "''"),
        (torch.int8, "torch.int8"),
        (16, "16"),
        (None, "None"),
        ([], r"\[\]"),
    ],
)
def test_what_cannot_be_used_is_shown_with_what_can(word, shown):
    with pytest.raises(
        PolicyError,
        match=(
            f"^dtype={shown} is not a dtype that can be used here. Choose one of: float16,"
            " bfloat16.$"
        ),
    ):
        parse_dtype(word)


def test_the_message_names_the_argument_that_was_wrong():
    with pytest.raises(PolicyError, match=r"^grad_dtype='bf61' .*Choose one of: float32\."):
        parse_dtype("bf61", allowed=(torch.float32,), what="grad_dtype")


def test_a_wide_dtype_is_refused_where_only_half_is_allowed():
    with pytest.raises(PolicyError, match="dtype='float32'"):
        parse_dtype("float32")


def test_dtypes_that_carry_an_intention_are_not_castable():
    assert CASTABLE_DTYPES.isdisjoint(
        {torch.float64, torch.complex64, torch.float8_e5m2, torch.int64, torch.bool}
    )


def test_what_the_caller_reads_itself_is_named_among_the_choices():
    with pytest.raises(
        PolicyError, match=r"Choose one of: auto, float16, bfloat16\. Did you mean 'auto'\?$"
    ):
        parse_dtype("atuo", beside=("auto",))


def test_a_dtype_that_is_known_but_not_allowed_is_not_taken_for_a_misspelling():
    with pytest.raises(PolicyError, match=r"Choose one of: float16, bfloat16\.$"):
        parse_dtype("float32")
