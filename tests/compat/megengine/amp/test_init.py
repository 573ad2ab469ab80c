"""`megengine.amp` as a module: the switch that is assigned to."""

import pytest
import torch

import mezzo
from mezzo.compat.megengine import amp


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(autouse=True)
def switch_is_put_back():
    yield
    amp.enabled = False
    amp.low_prec_dtype = "float16"


def test_assigning_switches_on_and_off():
    assert amp.enabled is False
    amp.enabled = True
    assert (amp.enabled, product()) == (True, torch.float16)
    amp.enabled = False
    assert (amp.enabled, product()) == (False, torch.float32)


def test_the_switch_goes_on_in_a_dtype_that_is_assigned_later():
    amp.enabled = True
    amp.low_prec_dtype = "bfloat16"
    assert (product(), amp.low_prec_dtype) == (torch.bfloat16, "bfloat16")


def test_a_dtype_alone_switches_nothing_on():
    amp.low_prec_dtype = torch.bfloat16
    assert (amp.enabled, product()) == (False, torch.float32)
    amp.enabled = True
    assert product() is torch.bfloat16


def test_inside_a_region_the_attributes_tell_what_is_in_force():
    with amp.autocast(low_prec_dtype="bfloat16"):
        assert (amp.enabled, amp.low_prec_dtype, amp.high_prec_dtype) == (
            True,
            "bfloat16",
            "float32",
        )
    assert (amp.enabled, amp.low_prec_dtype) == (False, "float16")


def test_off_is_off_inside_a_region_too():
    with amp.autocast():
        amp.enabled = False
        assert (amp.enabled, product()) == (False, torch.float32)


def test_a_region_of_mezzos_own_counts():
    with mezzo.autocast("cpu", dtype="bfloat16"):
        assert amp.enabled
        assert amp.low_prec_dtype == "bfloat16"


@pytest.mark.parametrize("word", ["float8", "float32", torch.float64], ids=str)
def test_a_dtype_that_is_no_16_bit_one_is_refused(word):
    with pytest.raises(ValueError, match=r"low_prec_dtype=.*Choose one of: float16, bfloat16"):
        amp.low_prec_dtype = word


def test_another_high_precision_than_float32_is_refused():
    amp.high_prec_dtype = "float32"
    with pytest.raises(ValueError, match="high_prec_dtype='float64'"):
        amp.high_prec_dtype = "float64"
