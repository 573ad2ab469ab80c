"""What devices compute in 16 bits."""

from __future__ import annotations

import pytest

import mezzo
from mezzo.compat import paddle


@pytest.mark.parametrize("device", [None, "cpu", paddle.CPUPlace()], ids=str)
def test_the_answer_is_what_auto_cast_does_there(device):
    found = mezzo.hardware("cpu" if device is not None else None)
    assert paddle.amp.is_float16_supported(device) is found.float16.supported
    assert paddle.amp.is_bfloat16_supported(device) is found.bfloat16.supported


def test_a_device_that_is_not_there_supports_nothing():
    assert not paddle.amp.is_float16_supported("xpu:0") or mezzo.hardware("xpu").float16.supported


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="The device must be a string such as 'cpu'"):
        paddle.amp.is_float16_supported("abacus")
