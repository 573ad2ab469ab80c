"""The floating-point dtypes that mezzo casts between, and their names."""

from __future__ import annotations

import torch

from mezzo._errors import PolicyError, choices, nearest

HALF_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The 16-bit dtypes that a policy can compute in."""

CASTABLE_DTYPES: frozenset[torch.dtype] = frozenset({torch.float32, *HALF_DTYPES})
"""The dtypes that a policy may cast. float64, float8 and complex tensors were chosen on purpose
and keep their dtype."""

_BY_NAME = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as policies spell it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def parse_dtype(
    value: str | torch.dtype,
    *,
    allowed: tuple[torch.dtype, ...] = HALF_DTYPES,
    what: str = "dtype",
    further: tuple[str, ...] = (),
) -> torch.dtype:
    """Return the dtype of a name or a torch dtype; raise `PolicyError` if it is not allowed.

    `what` is the name of the argument. `further` are other values that the caller accepts, such
    as "auto": the message lists them.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    dtype = _BY_NAME.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if dtype in allowed:
        return dtype
    shown = repr(value) if isinstance(value, str) else str(value)
    known = [*further, *(dtype_name(dtype) for dtype in allowed)]
    suggestion = nearest(value, known) if isinstance(value, str) and dtype is None else ""
    raise PolicyError(
        f"{what}={shown} is not a dtype that can be used here. {choices(known)}{suggestion}"
    )
