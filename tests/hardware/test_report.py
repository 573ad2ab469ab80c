"""The value that says what a device can do."""

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
    ("float16", "bfloat16", "best"),
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
def test_a_native_dtype_is_chosen_first_and_bfloat16_between_equals(float16, bfloat16, best):
    assert device(float16, bfloat16).preferred.dtype is best


def test_there_is_no_best_dtype_where_none_is_supported():
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
def test_the_choice_says_why_in_a_sentence(float16, bfloat16, reason):
    assert device(float16, bfloat16).preferred.reason == reason


@pytest.mark.parametrize("word", ["float16", "fp16", torch.float16])
def test_support_is_asked_by_name_or_dtype(word):
    assert device(NATIVE, SLOW).support(word) is NATIVE
    assert device(SLOW, NATIVE).support("bf16") is NATIVE


def test_float32_is_supported_everywhere():
    assert device(NONE, NONE).support(torch.float32).native


def test_a_dtype_that_is_no_choice_is_refused():
    with pytest.raises(
        PolicyError, match=r"dtype='int8'.*Choose one of: float16, bfloat16, float32"
    ):
        device(NATIVE, NATIVE).support("int8")


@pytest.mark.parametrize(
    ("float16", "bfloat16", "fast"),
    [
        (NATIVE, NATIVE, (torch.float16, torch.bfloat16)),
        (SLOW, NATIVE, (torch.bfloat16,)),
        (SLOW, NONE, ()),
    ],
)
def test_fast_lists_the_native_dtypes(float16, bfloat16, fast):
    assert device(float16, bfloat16).native_dtypes == fast


def test_a_person_can_read_it():
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


def test_a_person_reads_that_nothing_is_supported():
    lines = str(device(NONE, NONE, capability=None)).splitlines()
    assert lines[0] == "Device (cuda)"
    assert lines[-1] == "  auto      float32      No 16-bit dtype is supported."


def test_it_is_frozen_hashable_and_equal_by_value():
    one, same, other = device(NATIVE, SLOW), device(NATIVE, SLOW), device(SLOW, SLOW)
    assert one == same
    assert one != other
    assert len({one, same, other}) == 2
    with pytest.raises(FrozenInstanceError):
        one.name = "other"


def test_its_repr_can_be_pasted_back():
    value = device(NATIVE, SLOW)
    assert eval(repr(value), {"Hardware": Hardware, "Support": Support}) == value
