"""Gradients and expected results for the kernel that checks and unscales.

Used in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mezzo.scaling import check_unscale

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FACTORS = [1.0, 2.0**-16, 1.0 / 3.0, 3.0]
SIZES = [
    0,
    1,
    3,
    17,
    1000,
    check_unscale.CHUNK - 1,
    check_unscale.CHUNK,
    check_unscale.CHUNK + 1,
    2 * check_unscale.CHUNK + 5,
]


def fresh_seed() -> int:
    """Return a random seed. A test prints it when it fails."""
    return torch.Generator().seed()


def gradients(dtype: torch.dtype, device: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Return finite gradients of every layout.

    Contiguous, transposed, channels last, a slice with an unaligned start, strided, of one element,
    empty.
    """

    def fresh(*shape: int) -> torch.Tensor:
        # Magnitudes from subnormal to large, both signs, and zeros of both signs.
        limits = torch.finfo(dtype)
        lowest, highest = (-24.0, 14.0) if dtype is torch.float16 else (-135.0, 100.0)
        exponents = (
            torch.rand(shape, generator=generator, dtype=torch.float64) * (highest - lowest)
            + lowest
        )
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * exponents.exp2()
        values[torch.rand(shape, generator=generator) < 0.1] *= 0.0
        return values.clamp(limits.min / 4, limits.max / 4).to(dtype).to(device)

    return [
        *(fresh(size) for size in SIZES),
        fresh(),
        fresh(37, 41).T,
        fresh(2, 3, 5, 7).to(memory_format=torch.channels_last),
        fresh(4, 1, 6).transpose(0, 2),
        fresh(3 * check_unscale.CHUNK)[1:],
        fresh(12, 10)[:, ::3],
        fresh(6, 8)[1:, 2:],
    ]


def spoil(tensors: list[torch.Tensor], generator: torch.Generator) -> list[int]:
    """Put NaN or an infinity at random into some of the tensors; return the expected flags."""
    expected = []
    for tensor in tensors:
        chosen = tensor.numel() > 0 and torch.rand((), generator=generator).item() < 0.4
        if chosen:
            place = [int(torch.randint(size, (), generator=generator)) for size in tensor.shape]
            nonfinite = (float("nan"), float("inf"), -float("inf"))[
                int(torch.randint(3, (), generator=generator))
            ]
            tensor[tuple(place)] = nonfinite
        expected.append(int(chosen))
    return expected


def unscaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product rounded to float32 and then to the dtype, computed in float64."""
    product = tensor.double() * torch.tensor(factor, dtype=torch.float32).item()
    # The product of two 24-bit float32 values has 48 bits: exact in float64, and rounded once here.
    return product if tensor.dtype is torch.float64 else product.float().to(tensor.dtype)


def raised(device: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `found_inf` and the flags of `count` tensors, all zero."""
    return torch.zeros((), device=device), torch.zeros(count, dtype=torch.int32, device=device)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether tensors are bit-equal, where any NaN equals any other NaN."""
    return (
        got.shape == wanted.shape
        and bool((got.isnan() == wanted.isnan()).all())
        and torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor, including the payloads of NaN."""
    return tensor.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def check_against_reference(
    dtype: torch.dtype,
    device: str,
    factor: float,
    agree: Callable[[torch.Tensor, torch.Tensor], bool] = same,
) -> None:
    """Unscale gradients, some of them non-finite; compare values and flags with the reference."""
    generator = torch.Generator().manual_seed(seed := fresh_seed())
    tensors = gradients(dtype, device, generator)
    expected = spoil(tensors, generator)
    wanted = [unscaled(tensor, factor) for tensor in tensors]
    found, flags = raised(device, len(tensors))
    check_unscale.check_and_unscale(tensors, torch.tensor(factor, device=device), found, flags)
    assert flags.tolist() == expected, seed
    assert found.item() == float(any(expected)), seed
    assert [
        place
        for place, (got, want) in enumerate(zip(tensors, wanted, strict=True))
        if not agree(got, want)
    ] == [], seed
