"""Gradients for the kernel that checks and unscales, and what must come out: the same in Triton's interpreter and on a GPU."""

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
    """A seed that no run had before; a test says it when it fails."""
    return torch.Generator().seed()


def gradients(dtype: torch.dtype, device: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Finite gradients of every layout: contiguous, transposed, channels last, a slice whose start is not aligned, strided, of one element, empty."""

    def fresh(*shape: int) -> torch.Tensor:
        # Magnitudes from subnormal to large, signs, and zeros of both signs.
        information = torch.finfo(dtype)
        lowest, highest = (-24.0, 14.0) if dtype is torch.float16 else (-135.0, 100.0)
        exponents = (
            torch.rand(shape, generator=generator, dtype=torch.float64) * (highest - lowest)
            + lowest
        )
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * exponents.exp2()
        values[torch.rand(shape, generator=generator) < 0.1] *= 0.0
        return values.clamp(information.min / 4, information.max / 4).to(dtype).to(device)

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
    """Put NaN or an infinity somewhere into some of the tensors; give the flags to expect."""
    expected = []
    for tensor in tensors:
        chosen = tensor.numel() > 0 and torch.rand((), generator=generator).item() < 0.4
        if chosen:
            place = [int(torch.randint(size, (), generator=generator)) for size in tensor.shape]
            bad = (float("nan"), float("inf"), -float("inf"))[
                int(torch.randint(3, (), generator=generator))
            ]
            tensor[tuple(place)] = bad
        expected.append(int(chosen))
    return expected


def unscaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The product rounded once to float32 and once to the dtype, as the definition says, computed in float64."""
    product = tensor.double() * torch.tensor(factor, dtype=torch.float32).item()
    # Two float32 values of 24 bits make a product of 48: float64 holds it exactly, and this rounds
    # it once.
    return product if tensor.dtype is torch.float64 else product.float().to(tensor.dtype)


def raised(device: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags, all down."""
    return torch.zeros((), device=device), torch.zeros(count, dtype=torch.int32, device=device)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the last bit, NaN anywhere equal to NaN."""
    return (
        got.shape == wanted.shape
        and bool((got.isnan() == wanted.isnan()).all())
        and torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, the payload of NaN included."""
    return tensor.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def check_against_reference(
    dtype: torch.dtype,
    device: str,
    factor: float,
    agree: Callable[[torch.Tensor, torch.Tensor], bool] = same,
) -> None:
    """Unscale fresh gradients, some of them spoilt, and compare every value and every flag with the float64 reference."""
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
