"""Statistics of many tensors at once: range, headroom, underflow, exponents, lost updates.

Small samples of the tensors are collected while a step runs. At its end a few ops compute the
statistics of all of them on the device, and one asynchronous copy brings them to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan, log2
from typing import NamedTuple

import torch

from mezzo import _launch
from mezzo._dtypes import dtype_name
from mezzo._launch import AsyncCopy
from mezzo.observing.records import TensorStats
from mezzo.scaling.mesh import local

SAMPLE = 2**14
"""Values of a tensor that the statistics are of. Of larger tensors every n-th, n odd: all columns
of a matrix whose sides are powers of two are then sampled alike."""
_LOWEST = -150
"""Exponent of the first bin; values of float64 beyond the bins are counted in the last ones."""
_BINS = 280
_BLOCK = 128
"""Tensors whose statistics are computed together, which bounds the memory that this needs."""


class SampledTensor(NamedTuple):
    """A sample of a tensor's values, and the largest magnitude of all of them."""

    values: torch.Tensor
    """In the dtype of the tensor, one-dimensional."""
    largest: torch.Tensor
    """NaN if one value is; infinite if one is."""
    numel: int
    dtype: torch.dtype


class LostUpdates(NamedTuple):
    """Numbers of sampled values of one parameter, on the device."""

    had_gradient: torch.Tensor
    """Values with a gradient other than zero."""
    lost: torch.Tensor
    """Those of them that did not change."""
    changed: torch.Tensor
    """Values whose master weight changed."""
    lost_half: torch.Tensor
    """Those of them whose 16-bit parameter did not change."""

    @classmethod
    def between(
        cls,
        gradient: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        half_before: torch.Tensor,
        half_after: torch.Tensor,
    ) -> LostUpdates:
        """Compare samples of a parameter before and after an update, taken at the same places."""
        had_gradient = gradient.isfinite() & (gradient != 0)
        changed = before != after
        return cls(
            had_gradient.sum(),
            (had_gradient & ~changed).sum(),
            changed.sum(),
            (changed & (half_before == half_after)).sum(),
        )


def values_at_places(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of the sampled values of a tensor, in the memory order of `like`.

    >>> values_at_places(torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    tensor = local(tensor.detach())
    like = tensor if like is None else local(like.detach())
    if not _launch.is_dense(like):
        tensor = tensor.contiguous()
    elif tensor.stride() != like.stride():
        strided = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = strided.copy_(tensor)
    count = tensor.numel()
    flat = tensor.as_strided((count,), (1,))
    every = -(-count // SAMPLE)
    return (flat if every <= 1 else flat[:: every | 1]).clone()


def sample(tensor: torch.Tensor, like: torch.Tensor | None = None) -> SampledTensor:
    """Sample a tensor of floating-point values. Does not synchronize."""
    here = local(tensor.detach())
    if here.numel():
        low, high = torch.aminmax(here)
        largest = torch.maximum(low.neg(), high)
    else:
        largest = here.new_zeros(())
    return SampledTensor(values_at_places(tensor, like), largest, here.numel(), here.dtype)


@dataclass(frozen=True)
class PendingStats:
    """Statistics on their way to the host."""

    names: tuple[str, ...]
    samples: tuple[tuple[int, int, torch.dtype], ...]
    """Numbers of values and of sampled values, and dtype, of each tensor."""
    copy: AsyncCopy

    def arrived(self) -> bool:
        """Return whether the statistics are on the host."""
        return self.copy.arrived()

    def read(self) -> dict[str, TensorStats]:
        """Return the statistics by name. Call this only after `arrived()` returned True."""
        rows: list[list[float]] = self.copy.values()  # type: ignore[assignment]
        return {
            name: _stats(row, *one)
            for name, one, row in zip(self.names, self.samples, rows, strict=True)
        }


def compute_stats(
    samples: Sequence[tuple[str, SampledTensor]], lost: Sequence[LostUpdates] | None = None
) -> PendingStats:
    """Compute the statistics of samples, which are on one device, and start to copy them.

    >>> pending = compute_stats([("x", sample(torch.tensor([0.0, 1.0, 40000.0]).half()))])
    >>> stats = pending.read()["x"]
    >>> stats.zero, stats.max, round(stats.headroom, 2), stats.histogram
    (1, 40000.0, 0.71, ((0, 1), (15, 1)))
    """
    one_by_one = [tensor for _, tensor in samples]
    numbers = torch.cat(
        [
            _numbers(one_by_one[start : start + _BLOCK])
            for start in range(0, len(one_by_one), _BLOCK)
        ]
    )
    if lost is not None:
        numbers = torch.cat([torch.stack([torch.stack(one) for one in lost]), numbers], 1)
    else:
        numbers = torch.cat([numbers.new_full((len(samples), 4), -1.0), numbers], 1)
    return PendingStats(
        tuple(name for name, _ in samples),
        tuple((one.numel, one.values.numel(), one.dtype) for one in one_by_one),
        AsyncCopy(numbers),
    )


def _numbers(samples: Sequence[SampledTensor]) -> torch.Tensor:
    """Return a row for each sample: the numbers that `_stats` reads, then the histogram."""
    device = samples[0].values.device
    wide = torch.float64 if any(one.dtype is torch.float64 for one in samples) else torch.float32
    # Empty places are NaN, and subtracted from the NaN that are counted.
    values = torch.full((len(samples), SAMPLE), torch.nan, dtype=wide, device=device)
    for row, one in zip(values, samples, strict=True):
        row[: one.values.numel()].copy_(one.values)
    finite = values.isfinite()
    known = torch.where(finite, values, 0.0)
    used = finite & (values != 0)
    bins = (torch.frexp(known)[1] - (1 + _LOWEST)).clamp_(0, _BINS - 1).long()
    bins += torch.arange(len(samples), device=device)[:, None] * _BINS
    histogram = torch.zeros(len(samples) * _BINS, dtype=torch.int64, device=device)
    # One-dimensional: torch has a deterministic kernel for that.
    histogram.scatter_add_(0, bins.flatten(), used.flatten().long())
    columns = [
        torch.stack([one.largest.double() for one in samples]),
        values.isnan().sum(1),
        values.isinf().sum(1),
        (finite & (values == 0)).sum(1),
        torch.where(finite, values, torch.inf).amin(1),
        torch.where(finite, values, -torch.inf).amax(1),
        known.double().square().sum(1),
        finite.sum(1),
    ]
    rows = torch.stack([column.double() for column in columns], 1)
    return torch.cat([rows, histogram.view(-1, _BINS).double()], 1)


def _stats(row: list[float], count: int, sampled: int, dtype: torch.dtype) -> TensorStats:
    had_gradient, lost, changed, lost_half = row[:4]
    largest, nan, inf, zero, smallest_value, largest_value, squares, finite = row[4:12]
    histogram = tuple(
        (index + _LOWEST, int(number)) for index, number in enumerate(row[12:]) if number
    )
    info = torch.finfo(dtype)
    # frexp is exact: the smallest normal number is a power of two.
    lowest = round(log2(info.smallest_normal))
    small = sum(number for exponent, number in histogram if exponent < lowest)
    return TensorStats(
        dtype=dtype_name(dtype),
        count=count,
        sampled=sampled,
        nan=max(int(nan) - (SAMPLE - sampled), int(isnan(largest))),
        inf=max(int(inf), int(largest == float("inf"))),
        zero=int(zero),
        min=smallest_value if finite else None,
        max=largest_value if finite else None,
        rms=(squares / finite) ** 0.5 if finite else None,
        headroom=_headroom(largest, info.max),
        underflow=small / sampled if sampled else 0.0,
        histogram=histogram,
        lost=lost / had_gradient if had_gradient > 0 else None,
        lost_half=lost_half / changed if changed > 0 and dtype.itemsize == 2 else None,  # noqa: PLR2004
    )


def _headroom(largest: float, limit: float) -> float | None:
    if not isfinite(largest):
        return 0.0
    return log2(limit) - log2(largest) if largest else None
