"""Statistics of many tensors at once: range, headroom, underflow, exponents, lost updates.

Small samples of the tensors are collected while a step runs. At its end a few ops compute the
statistics of all of them on the device, and one asynchronous copy brings them to the host. No loop
here launches anything for a single tensor: a model has hundreds, and a launch takes microseconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from math import isfinite, isnan, log2
from typing import Generic, NamedTuple, TypeVar

import torch

from mezzo import _launch
from mezzo._dtypes import dtype_name
from mezzo._launch import AsyncCopy
from mezzo._torch import foreach_norm
from mezzo.observing.records import TensorStats
from mezzo.scaling.mesh import local

SAMPLE = 2**14
"""Values of a tensor that the statistics are of. Of larger tensors every n-th, n odd: all columns
of a matrix whose sides are powers of two are then sampled alike."""
_NUMBERS = 10
"""Numbers of each tensor before its histogram."""
_LOWEST = -150
"""Exponent of the first bin; values of float64 beyond the bins are counted in the last ones."""
_BINS = 280
_UNKNOWN = -1.0
"""Largest magnitude of a tensor that is sampled as a whole."""
_BLOCK = 256
"""Tensors whose statistics are computed together, which bounds the memory that this needs."""


Key = TypeVar("Key", bound=Hashable)


class SampledTensor(NamedTuple):
    """A sample of a tensor's values, and what the sample does not show."""

    values: torch.Tensor
    """In the dtype of the tensor, one-dimensional."""
    numel: int
    dtype: torch.dtype
    largest: torch.Tensor | None = None
    """Largest magnitude of all values, NaN if one is; None if it is that of the sample."""
    lost: torch.Tensor | None = None
    """Of updates: how many values had a gradient, how many of these stayed as they were; how many
    master weights changed, and of how many of these the 16-bit parameter stayed as it was."""


class Update(NamedTuple):
    """Samples of the parameters of a dtype, one after the other, before and after their update."""

    parameters: Sequence[torch.Tensor]
    sizes: Sequence[int]
    """Sampled values of each parameter."""
    gradient: torch.Tensor
    """Zero for parameters that have none."""
    before: torch.Tensor
    """Of the master weights, if there are any."""
    after: torch.Tensor
    stored_before: torch.Tensor
    """Of the parameters themselves."""
    stored_after: torch.Tensor


# -- samples ---------------------------------------------------------------------------------------


def places_of(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sampled values of a tensor in the memory order of `like`: a view if possible.

    Call it without gradients: it does not detach, which would be one more op for each tensor.

    >>> places_of(torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    tensor = local(tensor)
    like = tensor if like is None else local(like)
    if tensor is like and tensor.is_contiguous():
        pass
    elif not _launch.is_dense(like):
        tensor = tensor.contiguous()
    elif tensor.stride() != like.stride():
        strided = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = strided.copy_(tensor)
    count = tensor.numel()
    every = -(-count // SAMPLE)
    every = every if every <= 1 else every | 1
    return tensor.as_strided((-(-count // every) if count else 0,), (max(every, 1),))


def sample_all(
    tensors: Sequence[torch.Tensor], likes: Sequence[torch.Tensor] | None = None
) -> list[SampledTensor]:
    """Sample tensors of floating-point values, which are on one device. Does not synchronize."""
    local_tensors = [local(tensor) for tensor in tensors]
    values = copied(
        [places_of(*pair) for pair in zip(local_tensors, likes or local_tensors, strict=True)]
    )
    return [
        SampledTensor(value, tensor.numel(), tensor.dtype, largest)
        for value, largest, tensor in zip(
            values, _largest(local_tensors), local_tensors, strict=True
        )
    ]


def sample(tensor: torch.Tensor) -> SampledTensor:
    """Sample one tensor, by two launches at most, where others cannot wait for it."""
    here = local(tensor.detach())
    largest = torch.linalg.vector_norm(here, torch.inf) if here.numel() > SAMPLE else None
    return SampledTensor(places_of(here).clone(), here.numel(), here.dtype, largest)


def sample_updates(update: Update) -> list[SampledTensor]:
    """Return how each parameter changed, and what was lost."""
    changes = (update.after - update.before).split(list(update.sizes))
    had_gradient = update.gradient.nan_to_num(0.0, 0.0, 0.0) != 0
    changed = update.before != update.after
    flags = [
        had_gradient,
        had_gradient > changed,
        changed,
        changed & (update.stored_before == update.stored_after),
    ]
    return [
        SampledTensor(change, local(one).numel(), one.dtype, lost=lost)
        for change, one, lost in zip(
            changes, update.parameters, _sums(torch.stack(flags), update.sizes), strict=True
        )
    ]


def _sums(flags: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the sums of each row of flags [n, values], over parts of these sizes."""
    ends = _launch.table_on(flags.device, torch.tensor([0, *accumulate(sizes)]))
    # Sums of flags are int64, of which torch has a deterministic kernel.
    totals = torch.nn.functional.pad(flags.cumsum(1), (1, 0))[:, ends]
    return totals.diff(dim=1).T.unbind()


def _wide(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def copied(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of vectors: one tensor in memory for all of a dtype."""
    copies: dict[int, torch.Tensor] = {}
    for places in grouped(part.dtype for part in parts):
        chosen = [parts[place] for place in places]
        copies.update(zip(places, split_like(torch.cat(chosen), chosen), strict=True))
    return [copies[place] for place in range(len(parts))]


def split_like(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return views of a vector that have the sizes of other vectors."""
    views: Sequence[torch.Tensor] = flat.split([part.numel() for part in parts])
    return views


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the places of equal keys.

    >>> grouped("abca")
    [[0, 3], [1], [2]]
    """
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def _largest(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the largest magnitude of each tensor that is not sampled as a whole."""
    large = [place for place, tensor in enumerate(tensors) if tensor.numel() > SAMPLE]
    largest: list[torch.Tensor | None] = [None] * len(tensors)
    for group in grouped(tensors[place].dtype for place in large):
        places = [large[index] for index in group]
        norms = foreach_norm([tensors[place] for place in places], ord=torch.inf)
        for place, norm in zip(places, norms, strict=True):
            largest[place] = norm
    return largest


# -- statistics ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PendingStats(Generic[Key]):
    """Statistics on their way to the host."""

    names: tuple[Key, ...]
    samples: tuple[tuple[int, int, torch.dtype], ...]
    """Numbers of values and of sampled values, and dtype, of each tensor."""
    order: tuple[int, ...]
    """The tensor of each row."""
    widths: tuple[int, ...]
    """Places of each row."""
    copy: AsyncCopy

    def arrived(self) -> bool:
        """Return whether the statistics are on the host."""
        return self.copy.arrived()

    def read(self) -> dict[Key, TensorStats]:
        """Return the statistics by name. Call this only after `arrived()` returned True."""
        values = self.copy.result()
        histograms: list[list[tuple[int, int]]] = [[] for _ in self.order]
        counts = values[:, _NUMBERS:]
        places = counts.nonzero(as_tuple=True)
        for row, index, count in zip(
            *(indices.tolist() for indices in places), counts[places].tolist(), strict=True
        ):
            histograms[row].append((index + _LOWEST, int(count)))
        stats = {
            place: _stats(row, tuple(histogram), width, *self.samples[place])
            for place, row, histogram, width in zip(
                self.order, values[:, :_NUMBERS].tolist(), histograms, self.widths, strict=True
            )
        }
        return {name: stats[place] for place, name in enumerate(self.names)}


def compute_stats(
    samples: Sequence[tuple[Key, SampledTensor]],
) -> PendingStats[Key]:
    """Compute the statistics of samples, which are on one device, and start to copy them.

    >>> pending = compute_stats([("x", sample(torch.tensor([0.0, 1.0, 40000.0]).half()))])
    >>> stats = pending.read()["x"]
    >>> stats.zero, stats.max, round(stats.headroom, 2), stats.histogram
    (1, 40000.0, 0.71, ((0, 1), (15, 1)))
    """
    tensors = [tensor for _, tensor in samples]
    # Those of a dtype together, which torch concatenates at once, and small ones beside small ones.
    order = sorted(
        range(len(tensors)),
        key=lambda place: (str(tensors[place].values.dtype), tensors[place].values.numel()),
    )
    rows = [tensors[place] for place in order]
    blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    widths = [max(1, *(sample.values.numel() for sample in block)) for block in blocks]
    return PendingStats(
        tuple(name for name, _ in samples),
        tuple((tensor.numel, tensor.values.numel(), tensor.dtype) for tensor in tensors),
        tuple(order),
        tuple(width for block, width in zip(blocks, widths, strict=True) for _ in block),
        AsyncCopy(torch.cat(list(map(_numbers, blocks, widths)))),
    )


def _numbers(samples: Sequence[SampledTensor], width: int) -> torch.Tensor:
    """Return a row for each sample: the numbers that `_stats` reads, then the histogram."""
    values = _padded([sample.values for sample in samples], width)
    device, size = values.device, len(samples) * _BINS
    known = values.nan_to_num(0.0, 0.0, 0.0)
    finite = known == values
    exponents = torch.frexp(known)[1].clamp_(_LOWEST + 1, _LOWEST + _BINS)
    first = -(_LOWEST + 1)
    bins = exponents + torch.arange(first, first + size, _BINS, device=device)[:, None]
    histogram = torch.zeros(size, dtype=torch.int64, device=device)
    # One-dimensional: torch has a deterministic kernel for that.
    histogram.scatter_add_(0, bins.flatten(), (known != 0).flatten().long())
    columns = [
        torch.where(finite, values, torch.inf).amin(1).double(),
        torch.where(finite, values, -torch.inf).amax(1).double(),
        torch.linalg.vector_norm(known, dim=1, dtype=torch.float64),
    ]
    rows = [
        _lost(samples, device),
        _largest_column(samples, device),
        torch.stack([values.isnan(), finite]).sum(2).T,
        torch.stack(columns, 1),
        histogram.view(-1, _BINS),
    ]
    return torch.cat([row.double() for row in rows], 1)


def _padded(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return a row for each vector. Empty places are NaN, and subtracted from those counted."""
    wide, blocks = _wide(part.dtype for part in parts), []
    for dtype, run in groupby(parts, lambda part: part.dtype):
        padding = torch.full((width,), torch.nan, dtype=dtype, device=parts[0].device)
        # Cached: most parts have one of a few sizes.
        rest = cache(lambda size, padding=padding: padding[size:])
        blocks.append(torch.cat([piece for part in run for piece in (part, rest(len(part)))]))
    flat = (
        blocks[0].to(wide) if len(blocks) == 1 else torch.cat([block.to(wide) for block in blocks])
    )
    return flat.view(-1, width)


def _largest_column(samples: Sequence[SampledTensor], device: torch.device) -> torch.Tensor:
    columns = []
    for dtype, run in groupby(samples, lambda sample: sample.values.dtype):
        none = torch.full((), _UNKNOWN, dtype=dtype, device=device)
        largest = [none if sample.largest is None else sample.largest for sample in run]
        columns.append(torch.stack(largest).double())
    return torch.cat(columns)[:, None]


def _lost(samples: Sequence[SampledTensor], device: torch.device) -> torch.Tensor:
    none = torch.full((4,), -1, dtype=torch.int64, device=device)
    return torch.stack([none if sample.lost is None else sample.lost for sample in samples])


def _stats(
    row: list[float],
    histogram: tuple[tuple[int, int], ...],
    width: int,
    count: int,
    sampled: int,
    dtype: torch.dtype,
) -> TensorStats:
    had_gradient, lost, changed, lost_half = row[:4]
    largest, nan, finite, smallest_value, largest_value, norm = row[4:]
    nan, inf = nan - (width - sampled), width - nan - finite
    if largest == _UNKNOWN:
        largest = _largest_of(smallest_value, largest_value, nan=nan, inf=inf, finite=finite)
    lowest, limit = _range(dtype)
    small = sum(number for exponent, number in histogram if exponent < lowest)
    return TensorStats(
        dtype=dtype_name(dtype),
        count=count,
        sampled=sampled,
        nan=max(int(nan), int(isnan(largest))),
        inf=max(int(inf), int(largest == float("inf"))),
        zero=int(finite) - sum(number for _, number in histogram),
        min=smallest_value if finite else None,
        max=largest_value if finite else None,
        rms=norm / finite**0.5 if finite else None,
        headroom=_headroom(largest, limit),
        underflow=small / sampled if sampled else 0.0,
        histogram=histogram,
        lost=lost / had_gradient if had_gradient > 0 else None,
        lost_half=lost_half / changed if changed > 0 and dtype.itemsize == 2 else None,
    )


def _largest_of(smallest: float, largest: float, *, nan: float, inf: float, finite: float) -> float:
    """Return the largest magnitude in a sample: NaN if there is one, infinite if there is one."""
    if nan or inf:
        return float("nan" if nan else "inf")
    return max(-smallest, largest) if finite else 0.0


@cache
def _range(dtype: torch.dtype) -> tuple[int, float]:
    """Return the exponent of the smallest normal number, which is a power of two, and the limit."""
    info = torch.finfo(dtype)
    return round(log2(info.smallest_normal)), info.max


def _headroom(largest: float, limit: float) -> float | None:
    if not isfinite(largest):
        return 0.0
    return log2(limit) - log2(largest) if largest else None
