"""MegEngine's mixed-precision API on mezzo's engine, with torch tensors and modules."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._errors import PolicyError, unknown
from mezzo.compat.megengine import amp, autodiff, functional, optimizer

_DTYPE_NAMES = tuple("bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split())


def tensor(data: Any, dtype: Any = None, device: str | torch.device | None = None) -> torch.Tensor:
    """`megengine.tensor`: copy an array, a list or a number into a tensor.

    float64 data become float32 unless `dtype` is passed, since MegEngine has no float64.

    >>> tensor([0.0, 1.0], dtype="int32")
    tensor([0, 1], dtype=torch.int32)
    """
    result = torch.as_tensor(data, device=device).detach().clone()
    if dtype is not None:
        return result.to(_parse_dtype(dtype))
    return result.to(torch.float32) if result.dtype is torch.float64 else result


def _parse_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a name, a NumPy dtype or a torch dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    if name not in _DTYPE_NAMES:
        raise PolicyError(unknown("dtype", name, _DTYPE_NAMES))
    parsed: torch.dtype = getattr(torch, name)
    return parsed


__all__ = ["amp", "autodiff", "functional", "optimizer", "tensor"]
