"""float32 values at all edge cases of rounding to 16 bits."""

from __future__ import annotations

import torch

_LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x2000, 0x1FFF)
"""Exact in bfloat16, next to exact, the tie and its neighbours; the same for the thirteen bits
that float16 loses."""


def edges() -> torch.Tensor:
    """Return values of every sign and exponent, with mantissas at both ends and all roundings.

    Zeros, subnormals, infinities and NaN are among them.
    """
    upper = torch.arange(2**9, dtype=torch.int64)[:, None] << 7 | torch.tensor(
        [0x00, 0x01, 0x02, 0x3F, 0x40, 0x7E, 0x7F]
    )
    patterns = upper.flatten()[:, None] << 16 | torch.tensor(_LOW_HALVES)
    return patterns.flatten().to(torch.int32).view(torch.float32)


def every_upper_half() -> torch.Tensor:
    """Return all 65,536 bit patterns of bfloat16, each with several lower halves."""
    patterns = torch.arange(2**16, dtype=torch.int64)[:, None] << 16 | torch.tensor(_LOW_HALVES)
    return patterns.flatten().to(torch.int32).view(torch.float32)


def any_bits(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random bit patterns, so that all exponents are equally likely."""
    return (
        torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors are bit-equal, so that -0 is not 0; NaN equals NaN."""
    kind = torch.int16 if first.element_size() == 2 else torch.int32
    equal = first.contiguous().view(kind) == second.contiguous().view(kind)
    return (
        first.dtype is second.dtype
        and first.shape == second.shape
        and bool((equal | (first.isnan() & second.isnan())).all())
    )


def neighbours(value: torch.Tensor, half: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 16-bit numbers just below and above finite float64 values.

    Both are equal where the value is a 16-bit number. Computed with torch's own rounding only.
    """
    nearest = value.to(half)
    wide = nearest.double()
    below = torch.where(
        wide > value, torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)), nearest
    )
    above = torch.where(
        wide < value, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest
    )
    return below, above
