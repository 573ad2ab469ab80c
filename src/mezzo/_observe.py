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
    """How often one op gave one dtype."""

    op: str
    """The name of the ATen op, without its overload: `addmm`, `convolution_backward`."""
    dtype: str
    calls: int


class DtypeCounts:
    """What has run so far; it grows while the region is open and can be read at any time."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()

    def rows(self) -> tuple[DtypeCount, ...]:
        """Every pair of op and dtype that was seen, in order of names."""
        return tuple(
            DtypeCount(op, dtype, calls) for (op, dtype), calls in sorted(self._calls.items())
        )

    def by_dtype(self) -> Mapping[str, int]:
        """How many calls gave each dtype."""
        total: Counter[str] = Counter()
        for row in self.rows():
            total[row.dtype] += row.calls
        return dict(total)

    def of(self, op: str) -> Mapping[str, int]:
        """How many calls of one op gave each dtype; empty when it did not run."""
        return {row.dtype: row.calls for row in self.rows() if row.op == op}

    def add(self, op: str, dtype: str) -> None:
        """Count one more call."""
        self._calls[op, dtype] += 1


class _CountingMode(TorchDispatchMode):
    def __init__(self, counts: DtypeCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch left it without annotations
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view computes nothing: reshapes and detaches would drown the ops that matter.
        if not func.is_view:
            self._note(func.overloadpacket.__name__, result)
        return result

    def _note(self, op: str, result: Any) -> None:
        # The first one speaks for the op: a norm returns its output before its float32 statistics.
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self._counts.add(op, dtype_name(leaf.dtype))
                return


@contextmanager
def count_dtypes() -> Iterator[DtypeCounts]:
    """Count the ops that run in the block, by the dtype of their floating-point output.

    It slows every op down (by about 7 µs on a CPU) and compiled code escapes it: meant for one
    step, not for a whole training run.

    >>> with count_dtypes() as counts:
    ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> counts.of("mm")
    {'float32': 1}
    """
    counts = DtypeCounts()
    with _CountingMode(counts):
        yield counts
