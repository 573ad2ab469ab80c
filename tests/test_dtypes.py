"""Names of dtypes, and dtypes that are not allowed."""

import pytest
import torch

from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name, parse_dtype
from mezzo._errors import PolicyError


@pytest.mark.parametrize(
    "value", ["float16", "fp16", "half", "torch.float16", "torch.half", torch.float16, torch.half]
)
def test_every_name_of_float16_is_parsed(value):
    assert parse_dtype(value) is torch.float16


@pytest.mark.parametrize("value", ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16])
def test_every_name_of_bfloat16_is_parsed(value):
    assert parse_dtype(value) is torch.bfloat16


@pytest.mark.parametrize("value", ["float32", "fp32", "float", "torch.float32", torch.float32])
def test_float32_is_parsed_if_it_is_allowed(value):
    assert parse_dtype(value, allowed=(torch.float32,)) is torch.float32


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_the_name_of_a_dtype_is_torchs_without_the_module(dtype):
    assert getattr(torch, dtype_name(dtype)) is dtype


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("int8", "'int8'"),
        ("", "''"),
        (torch.int8, "torch.int8"),
        (16, "16"),
        (None, "None"),
        ([], r"\[\]"),
    ],
)
def test_another_value_raises_with_the_allowed_dtypes(value, shown):
    with pytest.raises(
        PolicyError,
        match=(
            f"^dtype={shown} is not a dtype that can be used here. Choose one of: float16,"
            " bfloat16.$"
        ),
    ):
        parse_dtype(value)


def test_the_message_names_the_argument():
    with pytest.raises(PolicyError, match=r"^grad_dtype='bf61' .*Choose one of: float32\."):
        parse_dtype("bf61", allowed=(torch.float32,), what="grad_dtype")


def test_float32_raises_if_only_16_bit_dtypes_are_allowed():
    with pytest.raises(PolicyError, match="dtype='float32'"):
        parse_dtype("float32")


def test_float64_float8_complex_and_integers_are_not_castable():
    assert CASTABLE_DTYPES.isdisjoint(
        {torch.float64, torch.complex64, torch.float8_e5m2, torch.int64, torch.bool}
    )


def test_further_values_of_the_caller_are_named_among_the_choices():
    with pytest.raises(
        PolicyError, match=r"Choose one of: auto, float16, bfloat16\. Did you mean 'auto'\?$"
    ):
        parse_dtype("atuo", further=("auto",))


def test_a_known_dtype_that_is_not_allowed_gets_no_suggestion():
    with pytest.raises(PolicyError, match=r"Choose one of: float16, bfloat16\.$"):
        parse_dtype("float32")
