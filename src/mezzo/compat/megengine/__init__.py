"""MegEngine's calls on mezzo's engine."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._errors import PolicyError, unknown
from mezzo.compat.megengine import amp, autodiff, functional, optimizer

_KINDS = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


def tensor(data: Any, dtype: Any = None, device: str | torch.device | None = None) -> torch.Tensor:
    """A tensor from an array, a list or a number. float64, which MegEngine has not, becomes float32 unless it is asked for.

    >>> tensor([0.0, 1.0], dtype="int32")
    tensor([0, 1], dtype=torch.int32)
    """
    made = torch.as_tensor(data, device=device).detach().clone()
    if dtype is not None:
        return made.to(_dtype(dtype))
    return made.to(torch.float32) if made.dtype is torch.float64 else made


def _dtype(word: Any) -> torch.dtype:
    """A dtype from MegEngine's words: a name, one of NumPy's or one of torch's."""
    if isinstance(word, torch.dtype):
        return word
    name = word if isinstance(word, str) else getattr(word, "__name__", None) or str(word)
    if name not in _KINDS:
        raise PolicyError(unknown("dtype", name, _KINDS))
    read: torch.dtype = getattr(torch, name)
    return read


__all__ = ["amp", "autodiff", "functional", "optimizer", "tensor"]
