"""MXNet's dtypes, which are NumPy's, as torch dtypes and back."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from mezzo._errors import choices

_NAMES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "uint8",
    "int8",
    "int32",
    "int64",
    "bool",
)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a NumPy dtype, scalar type or name; None is float32, as in MXNet.

    >>> torch_dtype("float16"), torch_dtype(float)
    (torch.float16, torch.float64)
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return torch.float32
    name = dtype if isinstance(dtype, str) else _name(dtype)
    if name not in _NAMES:
        raise TypeError(f"Unknown dtype {dtype!r}. {choices(_NAMES)}")
    result: torch.dtype = getattr(torch, name)
    return result


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Return NumPy's scalar type of a torch dtype; `torch.bfloat16`, which NumPy lacks, as it is.

    >>> numpy_dtype(torch.float16).__name__
    'float16'
    """
    name = str(dtype).removeprefix("torch.")
    return getattr(import_module("numpy"), "bool_" if name == "bool" else name, dtype)


def _name(dtype: Any) -> str:
    """Return the name of a NumPy dtype, of a scalar type, or of Python's float, int and bool."""
    name: str = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or repr(dtype)
    return {"float": "float64", "int": "int64", "bool_": "bool"}.get(name, name)
