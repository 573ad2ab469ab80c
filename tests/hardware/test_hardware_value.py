"""The `Hardware` value."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from mezzo._errors import PolicyError
from mezzo._hardware import Hardware, Support

NATIVE = Support(supported=True, native=True, reason="it has instructions for it")
SLOW = Support(supported=True, native=False, reason="torch emulates it")
NONE = Support(supported=False, native=False, reason="there are no kernels")


def device(float16, bfloat16, name="Device", capability="1.0"):
    return Hardware("cuda", name, capability, float16=float16, bfloat16=bfloat16)


@pytest.mark.parametrize(
    ("float16", "bfloat16", "preferred"),
    [
        (NATIVE, NATIVE, torch.bfloat16),
        (NATIVE, SLOW, torch.float16),
        (NATIVE, NONE, torch.float16),
        (SLOW, NATIVE, torch.bfloat16),
        (SLOW, SLOW, torch.bfloat16),
        (SLOW, NONE, torch.float16),
        (NONE, NATIVE, torch.bfloat16),
        (NONE, SLOW, torch.bfloat16),
    ],
)
def test_a_native_dtype_is_preferred_and_bfloat16_if_both_are_equal(float16, bfloat16, preferred):
    assert device(float16, bfloat16).preferred.dtype is preferred


def test_no_dtype_is_preferred_if_none_is_supported():
    assert device(NONE, NONE).preferred is None


@pytest.mark.parametrize(
    ("float16", "bfloat16", "reason"),
    [
        (
            NATIVE,
            NATIVE,
            (
                "bfloat16 is native on Device; float16 is native too, but bfloat16 has the range of"
                " float32 and needs no loss scaling."
            ),
        ),
        (
            NONE,
            NATIVE,
            (
                "bfloat16 is native on Device; bfloat16 has the range of float32 and needs no loss"
                " scaling."
            ),
        ),
        (
            NATIVE,
            SLOW,
            (
                "float16 is native on Device and bfloat16 is slow; train with loss scaling, since"
                " float16 has a short range."
            ),
        ),
        (
            NATIVE,
            NONE,
            (
                "float16 is native on Device and bfloat16 is unsupported; train with loss scaling,"
                " since float16 has a short range."
            ),
        ),
        (
            SLOW,
            SLOW,
            "bfloat16 is slow on Device: torch emulates it. Expect it to be slower than float32.",
        ),
        (
            SLOW,
            NONE,
            "float16 is slow on Device: torch emulates it. Expect it to be slower than float32.",
        ),
    ],
)
def test_the_choice_gives_the_reason_as_a_sentence(float16, bfloat16, reason):
    assert device(float16, bfloat16).preferred.reason == reason


@pytest.mark.parametrize("dtype", ["float16", "fp16", torch.float16])
def test_support_takes_a_name_or_a_dtype(dtype):
    assert device(NATIVE, SLOW).support(dtype) is NATIVE
    assert device(SLOW, NATIVE).support("bf16") is NATIVE


def test_float32_is_supported_everywhere():
    assert device(NONE, NONE).support(torch.float32).native


def test_support_for_another_dtype_raises():
    with pytest.raises(
        PolicyError, match=r"dtype='int8'.*Choose one of: float16, bfloat16, float32"
    ):
        device(NATIVE, NATIVE).support("int8")


@pytest.mark.parametrize(
    ("float16", "bfloat16", "native"),
    [
        (NATIVE, NATIVE, (torch.float16, torch.bfloat16)),
        (SLOW, NATIVE, (torch.bfloat16,)),
        (SLOW, NONE, ()),
    ],
)
def test_native_dtypes_are_listed(float16, bfloat16, native):
    assert device(float16, bfloat16).native_dtypes == native


def test_str_is_a_table():
    shown = str(device(NATIVE, SLOW, name="NVIDIA T4", capability="7.5"))
    assert shown.splitlines() == [
        "NVIDIA T4 (cuda, 7.5)",
        "  float16   native       it has instructions for it",
        "  bfloat16  slow         torch emulates it",
        (
            "  auto      float16      float16 is native on NVIDIA T4 and bfloat16 is slow; train"
            " with loss scaling, since float16 has a short range."
        ),
    ]


def test_str_without_supported_dtypes():
    lines = str(device(NONE, NONE, capability=None)).splitlines()
    assert lines[0] == "Device (cuda)"
    assert lines[-1] == "  auto      float32      No 16-bit dtype is supported."


def test_hardware_is_frozen_hashable_and_equal_by_value():
    one, same, other = device(NATIVE, SLOW), device(NATIVE, SLOW), device(SLOW, SLOW)
    assert one == same
    assert one != other
    assert len({one, same, other}) == 2
    with pytest.raises(FrozenInstanceError):
        one.name = "other"


def test_the_repr_evaluates_to_an_equal_value():
    value = device(NATIVE, SLOW)
    assert eval(repr(value), {"Hardware": Hardware, "Support": Support}) == value
