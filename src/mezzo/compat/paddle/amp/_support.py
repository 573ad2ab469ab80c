"""Which 16-bit dtypes a device supports, and the warning where they are slow."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from mezzo import Hardware, hardware
from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import user_stack_level
from mezzo.compat.paddle._places import device_count, device_of, parse_place

_CAPABILITIES = {"float16": "7.0", "bfloat16": "8.0"}
"""The first compute capability of NVIDIA GPUs with tensor cores for a dtype."""

_checked: set[tuple[torch.device, str]] = set()
"""Devices and dtypes that `warn_if_slow` has checked."""


def is_float16_supported(device: Any = None) -> bool:
    """Return whether `auto_cast` computes in float16 on a device.

    The device is a name (`"cpu"`, `"gpu:0"`), a place, or None for the default place. As in Paddle,
    GPUs do from compute capability 5.3 on. Paddle returns False for every CPU; here a CPU computes
    in float16 too. `mezzo.hardware()` has the dtypes that are fast.

    >>> is_float16_supported("cpu")
    True
    """
    return _is_supported(device, "float16")


def is_bfloat16_supported(device: Any = None) -> bool:
    """Return whether `auto_cast` computes in bfloat16 on a device.

    Paddle returns True for GPUs of compute capability 8.0 or later and for CPUs with AVX-512. Here
    older GPUs and other CPUs compute in bfloat16 too, slowly.

    >>> is_bfloat16_supported("cpu")
    True
    """
    return _is_supported(device, "bfloat16")


def warn_if_slow(dtype: str, device: torch.device | None = None) -> None:
    """Warn once if a device (that of the default place) emulates a 16-bit dtype, or lacks it."""
    device = device_of(device)
    if (device, dtype) in _checked:
        return
    _checked.add((device, dtype))
    facts = hardware(device)
    if not facts.support(dtype).native:
        warnings.warn(_message(facts, dtype), UserWarning, stacklevel=user_stack_level())


def _is_supported(device: Any, dtype: str) -> bool:
    place = parse_place(device)
    if not device_count(place.device_type):
        return False
    return hardware(device_of(place)).support(dtype).supported


def _message(facts: Hardware, dtype: str) -> str:
    support = facts.support(dtype)
    if facts.device == "cuda" and re.fullmatch(r"\d+\.\d+", facts.capability or ""):
        # The text of Paddle's guide.
        problem = (
            f"AMP only support NVIDIA GPU with Compute Capability {_CAPABILITIES[dtype]} or higher,"
            f" current GPU is: {facts.name}, with Compute Capability: {facts.capability}."
        )
    else:
        capability = f", {facts.capability}" if facts.capability else ""
        problem = f"AMP is slow on {facts.name} ({facts.device}{capability})."
    effect = f"{dtype} runs here, slowly" if support.supported else "Everything runs in float32"
    native = [dtype_name(dtype) for dtype in HALF_DTYPES if facts.support(dtype).native]
    remedy = f" Use dtype={native[0]!r}." if native else ""
    return f"{problem} {effect}: {support.reason}.{remedy}"
