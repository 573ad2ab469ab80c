"""Read values of the records of a log: numbers, steps, counts of gradients, statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Line = Mapping[str, Any]
"""One record of a log as plain data."""


class LoggedCounts(NamedTuple):
    """Counts of one gradient from a `gradients` record, zeros apart from what underflowed."""

    overflowed: float = 0.0
    underflowed: float = 0.0
    zeros: float = 0.0
    total: float = 0.0

    def plus(self, other: LoggedCounts) -> LoggedCounts:
        """Return the sums."""
        return LoggedCounts(*map(sum, zip(self, other, strict=True)))

    @property
    def underflow(self) -> float | None:
        """Share of the values that are not zero and below the smallest normal number."""
        values = self.total - self.zeros
        return self.underflowed / values if values > 0 else None

    @property
    def zero_share(self) -> float | None:
        """Share of the values that are zero."""
        return self.zeros / self.total if self.total else None


def number(value: Any) -> float | None:
    """Return a number of a log; None for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def finite(value: Any) -> float | None:
    """Return a finite number of a log; None for other values."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def plain_number(value: float) -> str:
    """Return a number as a person writes it.

    >>> plain_number(8388608.0), plain_number(0.0043)
    ('8,388,608', '0.0043')
    """
    is_whole = value == int(value) and abs(value) < 10**15
    return f"{int(value):,}" if is_whole else f"{value:.4g}"


def step_of(line: Line) -> int | None:
    """Return the number of a record's step; None without one."""
    found = finite(line.get("step"))
    return None if found is None else int(found)


def gradient_counts(line: Line) -> Iterator[tuple[str, LoggedCounts]]:
    """Yield the counts of each gradient, by name, of a `gradients` record."""
    layers, zeros = line.get("layers"), line.get("zeros")
    zeros = zeros if isinstance(zeros, dict) else {}
    for name, row in layers.items() if isinstance(layers, dict) else ():
        if isinstance(row, list | tuple) and len(row) >= 3:
            over, under, total = (finite(value) or 0.0 for value in row[:3])
            zero = finite(zeros.get(name)) or 0.0
            # Zeros count as underflowed in the log: whether they were is not known.
            yield str(name), LoggedCounts(over, max(under - zero, 0.0), zero, total)


def tensor_stats(line: Line) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the statistics of each tensor, by name, of a `tensors` record."""
    stats = line.get("stats")
    for name, value in stats.items() if isinstance(stats, dict) else ():
        if isinstance(value, dict):
            yield str(name), value
