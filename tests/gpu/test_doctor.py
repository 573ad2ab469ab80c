"""`mezzo doctor` on a GPU."""

import pytest

from mezzo.cli.doctor import diagnose
from mezzo.cli.machine import read_machine

pytestmark = pytest.mark.gpu


def test_products_are_timed_and_16_bits_are_faster_than_float32():
    diagnosis = diagnose(read_machine("cuda"))
    assert [one.dtype for one in diagnosis.machine.products] == [
        "float32",
        "tf32",
        "float16",
        "bfloat16",
    ]
    assert all(one.seconds for one in diagnosis.machine.products)
    assert diagnosis.speeds["bfloat16"] > 1.5
    assert not diagnosis.has_problem
    assert "Train with dtype='bfloat16', without loss scaling." in str(diagnosis)
