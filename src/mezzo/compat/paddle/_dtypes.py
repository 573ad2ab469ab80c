"""Paddle's names of dtypes."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    ).split()
}
"""Paddle's names of dtypes, which are torch's."""
_ALIASES = {"float": torch.float32, "double": torch.float64, "half": torch.float16}


def parse_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype for a dtype, its name, or a NumPy type.

    >>> parse_dtype("int64"), parse_dtype(torch.float16)
    (torch.int64, torch.float16)
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if name is None:
        name = getattr(dtype, "__name__", str(dtype))
    name = str(name).removeprefix("paddle.")
    found = DTYPES.get(name) or _ALIASES.get(name)
    if found is None:
        raise TypeError(
            f"dtype must be one of {', '.join(DTYPES)}, or paddle.float32 and its like, but got"
            f" {dtype!r}."
        )
    return found
