"""Float32 numbers at every edge, for what rounds them to 16 bits."""

from __future__ import annotations

import torch

_LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x2000, 0x1FFF)
"""Exact in bfloat16, next to it, the tie and its neighbours; and the same for float16's thirteen
lost bits."""


def edges() -> torch.Tensor:
    """Every sign and exponent (zeros, subnormals, infinities and NaN among them), mantissas at both ends, and each case of rounding."""
    upper = torch.arange(2**9, dtype=torch.int64)[:, None] << 7 | torch.tensor(
        [0x00, 0x01, 0x02, 0x3F, 0x40, 0x7E, 0x7F]
    )
    words = upper.flatten()[:, None] << 16 | torch.tensor(_LOW_HALVES)
    return words.flatten().to(torch.int32).view(torch.float32)


def every_upper_half() -> torch.Tensor:
    """All 65,536 patterns of bfloat16, each with a few lower halves."""
    words = torch.arange(2**16, dtype=torch.int64)[:, None] << 16 | torch.tensor(_LOW_HALVES)
    return words.flatten().to(torch.int32).view(torch.float32)


def any_bits(count: int, generator: torch.Generator) -> torch.Tensor:
    """Bits at random, so that every exponent is as likely as any other."""
    return (
        torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal to the last bit, so that -0 is not 0; NaN equals NaN."""
    kind = torch.int16 if first.element_size() == 2 else torch.int32
    equal = first.contiguous().view(kind) == second.contiguous().view(kind)
    return (
        first.dtype is second.dtype
        and first.shape == second.shape
        and bool((equal | (first.isnan() & second.isnan())).all())
    )


def neighbours(value: torch.Tensor, half: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16-bit numbers just below and just above finite float64 values, equal where the value is one; found without rounding arithmetic of our own."""
    nearest = value.to(half)
    wide = nearest.double()
    below = torch.where(
        wide > value, torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)), nearest
    )
    above = torch.where(
        wide < value, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest
    )
    return below, above
