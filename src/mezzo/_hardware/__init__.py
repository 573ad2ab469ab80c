"""Which 16-bit dtypes a device supports.

`detect` reads what torch reports about a device, `support` concludes from that. No device is
queried at import.
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
    """Return the 16-bit dtypes that a device supports and computes natively, with the reasons.

    Without an argument, the device is the current accelerator, or the CPU if there is none. On a
    device that this machine lacks, nothing is supported.

    >>> hardware("cpu").support("bfloat16").supported
    True
    """
    found = _detect(find_device(device))
    if listening():
        native = tuple(dtype_name(dtype) for dtype in found.native_dtypes)
        emit(HardwareDetected(found.device, found.name, native))
    return found


@cache
def _detect(device: torch.device) -> Hardware:
    return judge(probe(device))
