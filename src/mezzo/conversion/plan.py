"""What a conversion decided: a row for each node, printable, and plain enough to be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, overload

from mezzo._errors import CheckpointError

_WIDEST = 48


@dataclass(frozen=True)
class GraphRow:
    """One node and its precision."""

    node: str
    """Its name; one in the body of a branch or loop has the body's name before it."""
    op: str
    """The op's name, or what else the node is: weight, input, cast."""
    module: str
    """The path of the module that called it, or a weight's own name; empty for the model itself."""
    source: str
    """The file and line that called it."""
    dtype: str
    """What it computes in, or is stored in; two where a weight is stored twice."""
    reason: str

    @property
    def where(self) -> str:
        """The module, or the source line where there is none."""
        return self.module or self.source


@dataclass(frozen=True)
class CastBytes:
    """Casts, counted."""

    count: int = 0
    """How many there are."""
    bytes: int = 0
    """How many bytes they read and write."""

    def __add__(self, other: CastBytes) -> CastBytes:
        return CastBytes(self.count + other.count, self.bytes + other.bytes)

    def __str__(self) -> str:
        return f"{self.count} casts, {self.bytes / 1e6:.3g} MB"


@dataclass(frozen=True)
class Casts:
    """The casts of a graph, as torch.autocast would make them and as they are now."""

    before: CastBytes
    """What torch.autocast would do on the same graph: each op casts its inputs, weights once."""
    after: CastBytes
    """What the converted graph does."""

    def __str__(self) -> str:
        return f"{self.after}; torch.autocast: {self.before}"


@dataclass(frozen=True)
class GraphPlan(Sequence[GraphRow]):
    """The precision of every node, with the reason; printed, it is a table.

    >>> print(GraphPlan((GraphRow("linear", "linear", "head", "model.py:7", "bfloat16", "a matrix product"),)))
    node    where  dtype     reason
    linear  head   bfloat16  a matrix product
    """

    rows: tuple[GraphRow, ...]
    casts: Casts = field(default=Casts(CastBytes(), CastBytes()))
    """The casts before and after."""

    @overload
    def __getitem__(self, index: int) -> GraphRow: ...
    @overload
    def __getitem__(self, index: slice) -> GraphPlan: ...
    def __getitem__(self, index: int | slice) -> GraphRow | GraphPlan:
        return (
            GraphPlan(self.rows[index], self.casts)
            if isinstance(index, slice)
            else self.rows[index]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[GraphRow]:
        return iter(self.rows)

    def row(self, node: str) -> GraphRow:
        """The row of one node."""
        for one in self.rows:
            if one.node == node:
                return one
        raise KeyError(node)

    def __str__(self) -> str:
        table = [
            ("node", "where", "dtype", "reason"),
            *((row.node, row.where, row.dtype, row.reason) for row in self.rows),
        ]
        widths = [min(max(len(line[column]) for line in table), _WIDEST) for column in range(3)]
        return "\n".join(
            "  ".join(
                [*(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)), line[3]]
            )
            for line in table
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> GraphPlan:
        """Read a plan from plain data, or say that it is none."""
        try:
            rows = tuple(
                GraphRow(**{one.name: _text(row[one.name]) for one in fields(GraphRow)})
                for row in plain["rows"]
            )
            before, after = (
                CastBytes(int(counted["count"]), int(counted["bytes"]))
                for counted in (plain["casts"]["before"], plain["casts"]["after"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"This is not the plan of a converted graph: {error!r}."
            ) from error
        return cls(rows, Casts(before, after))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text belongs here, not {value!r}")
    return value
