"""`oneflow.amp.autocast`: OneFlow's op lists in eager code."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from mezzo._errors import UnsupportedError
from mezzo.autocasting.autocast import autocast as _autocast

PRESET = "oneflow"

_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""What a region computes in where no dtype is said."""


class autocast(_autocast):  # noqa: N801 - OneFlow's spelling
    """OneFlow's lists inside: listed ops in 16 bits, what follows them if all its inputs are, everything unlisted in float32.

    On a CPU too, where OneFlow warns and does nothing.

    >>> with autocast("cpu"):
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 - OneFlow's call shape
        cache_enabled: bool | None = None,  # noqa: FBT001
    ) -> None:
        if not is_dynamo_compiling() and device_type not in _DTYPES:
            raise UnsupportedError(f"User specified autocast device_type must be 'cuda' or 'cpu', got {device_type!r}.")
        super().__init__(device_type, _DTYPES[device_type] if dtype is None else dtype, enabled, cache_enabled, preset=PRESET)
