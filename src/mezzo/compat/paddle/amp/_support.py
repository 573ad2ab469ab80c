"""What devices compute in 16 bits."""

from __future__ import annotations

from typing import Any

from mezzo import hardware
from mezzo.compat.paddle._places import device_of


def is_float16_supported(device: Any = None) -> bool:
    """Whether `auto_cast` computes in float16 on a device (`"cpu"`, `"gpu:0"`; None is the one that is set).

    Paddle says yes to GPUs from compute capability 5.3 and no to every CPU; here a CPU computes float16 too, if slowly: `mezzo.hardware()` tells how fast.

    >>> is_float16_supported("cpu")
    True
    """
    return hardware(device_of(device).type).float16.supported


def is_bfloat16_supported(device: Any = None) -> bool:
    """Whether `auto_cast` computes in bfloat16 on a device. Paddle says yes to GPUs from compute capability 8.0 and to CPUs with AVX-512.

    >>> is_bfloat16_supported("cpu")
    True
    """
    return hardware(device_of(device).type).bfloat16.supported
