"""Repeat an op in float32 if the device has no 16-bit kernel for it.

For ops that the function mode of a policy sees. For torch's own lists see `float32_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch

from mezzo import _events
from mezzo._casting import cast_all
from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.policy import missing_kernels
from mezzo.policy.registry import Function

_NO_KERNEL = (
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "Unsupported dtype Half",
    "Unsupported dtype BFloat16",
    "Low precision dtypes not supported",
    "could not create a primitive descriptor",
)


def means_missing_kernel(error: Exception) -> bool:
    """Return whether an error of torch means that an op has no 16-bit kernel.

    >>> means_missing_kernel(RuntimeError("qr not implemented for 'Half'"))
    True
    """
    return any(text in str(error) for text in _NO_KERNEL)


def retry_in_float32(
    error: Exception,
    func: Function,
    op: str,
    dtype: torch.dtype | None,
    device: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call again in float32 if the error means that a 16-bit kernel is missing; else raise it."""
    if dtype not in HALF_DTYPES or not means_missing_kernel(error):
        raise error
    missing_kernels.record_missing(op, dtype, device)
    if _events.listening():
        _events.emit(
            _events.Float32Fallback(op, device, dtype_name(dtype), str(error).splitlines()[0])
        )
    return func(*cast_all(args, torch.float32, device), **cast_all(kwargs, torch.float32, device))
