"""The switch behind `amp.enabled`, and the dtype it uses."""

from __future__ import annotations

import torch

from mezzo._dtypes import dtype_name, parse_dtype
from mezzo.autocasting.autocast import disable, everywhere, switch_to, switched_to
from mezzo.autocasting.regions import current_regions

PRESET = "megengine"

_low = torch.float16


def is_on() -> bool:
    """Whether precision is automatic in this thread just now."""
    return any(region.enabled for region in current_regions())


def turn(*, on: bool) -> None:
    """Throw the switch. Off is off inside a region too, until that region ends."""
    disable()
    if on:
        switch_to(everywhere(preset=PRESET, dtype=_low))
    elif is_on():
        switch_to(everywhere(preset=PRESET, enabled=False))


def low_dtype() -> str:
    """The 16-bit dtype in force, or the one that the switch would use."""
    return next((dtype_name(region.computes_in) for region in current_regions() if region.enabled), dtype_name(_low))


def set_low_dtype(word: str | torch.dtype) -> None:
    """Set the switch's 16-bit dtype; what it has switched on goes on in that one."""
    global _low
    _low = parse_dtype(word, what="low_prec_dtype")
    if switched_to() is not None and is_on():
        turn(on=True)


def require_float32(word: str | torch.dtype) -> None:
    """Refuse any other high precision: an op that is to be exact runs in float32."""
    parse_dtype(word, allowed=(torch.float32,), what="high_prec_dtype")
