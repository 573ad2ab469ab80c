"""What the device can do with 16-bit dtypes: probe (asks torch), judge (concludes), `Hardware` (the value everybody passes on).

Nothing is asked at import.
"""

from __future__ import annotations

from functools import cache

import torch

from mezzo._dtypes import dtype_name
from mezzo._events import HardwareDetected, emit, listening
from mezzo._hardware.detect import find_device, probe
from mezzo._hardware.support import DtypeChoice, Hardware, Support, judge

__all__ = ["DtypeChoice", "Hardware", "Support", "hardware"]


def hardware(device: str | torch.device | None = None) -> Hardware:
    """Say what a device can do; without one, the current accelerator, or the CPU where there is none.

    A device type that torch knows and this machine lacks answers too, with nothing supported and
    the reason.

    >>> hardware("cpu").support("bfloat16").supported
    True
    """
    found = _detect(find_device(device))
    if listening():
        emit(
            HardwareDetected(
                found.device, found.name, tuple(dtype_name(dtype) for dtype in found.native_dtypes)
            )
        )
    return found


@cache
def _detect(device: torch.device) -> Hardware:
    return judge(probe(device))
