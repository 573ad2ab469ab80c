"""`mezzo.count_dtypes`: count ops by the dtype of their output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mezzo.observing.op_stats import OpStats


@dataclass(frozen=True)
class DtypeCount:
    """Number of calls of one op with one output dtype."""

    op: str
    """The name of the ATen op, without its overload: `addmm`, `convolution_backward`."""
    dtype: str
    calls: int


class DtypeCounts:
    """Counts of the ops that ran so far. Can be read at any time, inside the region too."""

    def __init__(self, stats: OpStats) -> None:
        self._stats = stats

    def rows(self) -> tuple[DtypeCount, ...]:
        """Return one row per op and floating-point dtype, sorted by name."""
        calls: Counter[tuple[str, str]] = Counter()
        for row in self._stats.rows:
            if "float" in row.dtype:
                calls[row.op, row.dtype] += row.calls
        return tuple(DtypeCount(op, dtype, count) for (op, dtype), count in sorted(calls.items()))

    def by_dtype(self) -> Mapping[str, int]:
        """Return the number of calls per output dtype."""
        total: Counter[str] = Counter()
        for row in self.rows():
            total[row.dtype] += row.calls
        return dict(total)

    def of(self, op: str) -> Mapping[str, int]:
        """Return the number of calls of one op per output dtype; empty if it did not run."""
        return {row.dtype: row.calls for row in self.rows() if row.op == op}

    def __str__(self) -> str:
        """Show a row per op and dtype, with its calls."""
        rows = self.rows()
        width = max((len(row.op) for row in rows), default=0)
        return "\n".join(f"{row.op:{width}}  {row.dtype:8}  {row.calls:,}" for row in rows)


@contextmanager
def count_dtypes() -> Iterator[DtypeCounts]:
    """Count the ops that run in the block, by the dtype of their floating-point output.

    `mezzo.op_stats` also has modules, casts and times; what its documentation lists holds here too.

    >>> import torch
    >>> x = torch.ones(2, 2)
    >>> with count_dtypes() as counts:
    ...     _ = x @ x
    >>> counts.of("mm")
    {'float32': 1}
    >>> print(counts)
    mm  float32   1
    """
    with OpStats() as stats:
        yield DtypeCounts(stats)
