"""Count ops by the dtype of their output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mezzo._dtypes import dtype_name
from mezzo._torch import TorchDispatchMode, pytree


@dataclass(frozen=True)
class DtypeCount:
    """Number of calls of one op with one output dtype."""

    op: str
    """The name of the ATen op, without its overload: `addmm`, `convolution_backward`."""
    dtype: str
    calls: int


class DtypeCounts:
    """Counts of the ops that ran so far. Can be read at any time, inside the region too."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()

    def rows(self) -> tuple[DtypeCount, ...]:
        """Return one row per op and dtype, sorted by name."""
        return tuple(
            DtypeCount(op, dtype, calls) for (op, dtype), calls in sorted(self._calls.items())
        )

    def by_dtype(self) -> Mapping[str, int]:
        """Return the number of calls per output dtype."""
        total: Counter[str] = Counter()
        for row in self.rows():
            total[row.dtype] += row.calls
        return dict(total)

    def of(self, op: str) -> Mapping[str, int]:
        """Return the number of calls of one op per output dtype; empty if it did not run."""
        return {row.dtype: row.calls for row in self.rows() if row.op == op}

    def add(self, op: str, dtype: str) -> None:
        """Count one call."""
        self._calls[op, dtype] += 1


class _CountingMode(TorchDispatchMode):
    def __init__(self, counts: DtypeCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views compute nothing, and would outnumber the ops that do.
        if not func.is_view:
            self._count(func.overloadpacket.__name__, result)
        return result

    def _count(self, op: str, result: Any) -> None:
        # The first floating-point output: a norm returns its output before its float32 statistics.
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self._counts.add(op, dtype_name(leaf.dtype))
                return


@contextmanager
def count_dtypes() -> Iterator[DtypeCounts]:
    """Count the ops that run in the block, by the dtype of their floating-point output.

    Compiled code is not seen. Every op becomes slower, by about 7 µs on a CPU: use it for one step,
    not for a whole training run.

    >>> with count_dtypes() as counts:
    ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> counts.of("mm")
    {'float32': 1}
    """
    counts = DtypeCounts()
    with _CountingMode(counts):
        yield counts
