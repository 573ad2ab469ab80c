"""Fake devices."""

from __future__ import annotations

from mezzo._hardware import Hardware, Support

NATIVE = Support(supported=True, native=True, reason="it has instructions for it")
SLOW = Support(supported=True, native=False, reason="torch emulates it")
NONE = Support(supported=False, native=False, reason="it has no kernels for it")


def device(
    float16: Support = NATIVE,
    bfloat16: Support = NATIVE,
    *,
    kind: str = "cuda",
    name: str = "Fake 100",
) -> Hardware:
    """Return a device that supports the two dtypes as given."""
    return Hardware(kind, name, "1.0", float16=float16, bfloat16=bfloat16)
