"""What becomes of one tensor, as a line that can be read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from mezzo._dtypes import dtype_name


@dataclass(frozen=True)
class Row:
    """One parameter or buffer: its dtype before and after, and why."""

    name: str
    """Its qualified name; with several models `models[0].encoder.weight`."""
    kind: str
    """`parameter` or `buffer`."""
    shape: tuple[int, ...]
    before: torch.dtype
    after: torch.dtype
    master: bool
    """Whether something lies beside it, or updates are rounded, so that small updates count."""
    reason: str

    @property
    def numel(self) -> int:
        """How many elements."""
        return prod(self.shape)

    @property
    def change(self) -> str:
        """Its dtype in words: `float32 → bfloat16`, or just the one that stays."""
        before, after = dtype_name(self.before), dtype_name(self.after)
        return before if before == after else f"{before} → {after}"


def table(rows: tuple[Row, ...]) -> list[str]:
    """Rows as aligned lines, under a heading."""
    cells = [("name", "shape", "dtype", "why"), *((row.name, _shape(row), row.change, row.reason) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip() for line in cells]


def size(count: int) -> str:
    """Bytes as people read them.

    >>> size(12 * 2**20 + 2**19), size(300)
    ('12.5 MiB', '300 bytes')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} bytes"


def _shape(row: Row) -> str:
    return " × ".join(map(str, row.shape)) or "scalar"
