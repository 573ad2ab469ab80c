"""The floating-point types mezzo moves between, and their names."""

from __future__ import annotations

import torch

from mezzo._errors import PolicyError, choices, nearest

HALF_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""The 16-bit types a policy can compute in."""

CASTABLE_DTYPES: frozenset[torch.dtype] = frozenset({torch.float32, *HALF_DTYPES})
"""The types a policy may cast. float64, float8 and complex tensors carry an intention of their
own and are left alone."""

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
    """Name a dtype the way policies spell it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def parse_dtype(
    word: str | torch.dtype,
    *,
    allowed: tuple[torch.dtype, ...] = HALF_DTYPES,
    what: str = "dtype",
    beside: tuple[str, ...] = (),
) -> torch.dtype:
    """Read a dtype from a name or a torch dtype, and refuse what is not allowed; `beside` names what the caller reads itself, such as `auto`.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    dtype = _BY_NAME.get(word.removeprefix("torch.")) if isinstance(word, str) else word
    if dtype in allowed:
        return dtype
    shown = repr(word) if isinstance(word, str) else str(word)
    known = [*beside, *(dtype_name(one) for one in allowed)]
    meant = nearest(word, known) if isinstance(word, str) and dtype is None else ""
    raise PolicyError(
        f"{what}={shown} is not a dtype that can be used here. {choices(known)}{meant}"
    )
