"""The plan of a converted graph: one row per node, printable and serializable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, overload

from mezzo._errors import CheckpointError

_WIDEST = 48
"""Characters to which the columns before the last are padded at most."""


@dataclass(frozen=True)
class GraphRow:
    """One node and its precision."""

    node: str
    """Its name; in the body of a branch or loop, the body's name comes before it."""
    op: str
    """The op, or else the kind of node: weight, input, cast, fill."""
    module: str
    """The path of the module that called it, or the name of a weight; empty for the model."""
    source: str
    """The file and line that called it."""
    dtype: str
    """The dtype in which it computes, or is stored; two if a weight is stored twice."""
    reason: str
    """Why it has this dtype."""

    @property
    def where(self) -> str:
        """The module, or the source line if the module is not known."""
        return self.module or self.source


@dataclass(frozen=True)
class CastBytes:
    """A number of casts, and the bytes that they move."""

    count: int = 0
    """Number of casts."""
    bytes: int = 0
    """Bytes that they read and write."""

    def __add__(self, other: CastBytes) -> CastBytes:
        return CastBytes(self.count + other.count, self.bytes + other.bytes)

    def __str__(self) -> str:
        return f"{self.count} casts, {self.bytes / 1e6:.3g} MB"


@dataclass(frozen=True)
class Casts:
    """The casts of a graph under torch.autocast, and after the conversion."""

    before: CastBytes
    """Casts of torch.autocast on the same graph: each op casts its inputs, weights once."""
    after: CastBytes
    """Casts of the converted graph."""

    def __str__(self) -> str:
        return f"{self.after}; torch.autocast: {self.before}"


@dataclass(frozen=True)
class GraphPlan(Sequence[GraphRow]):
    """The dtype of every node of a converted graph, with the reason.

    A plan is a sequence of `GraphRow`: first the ops in graph order, then the stored weights. Print
    it to see a table, find the row of a node with `row("linear_1")`, and read in `casts` how many
    casts are left. The names in the column `node` are those that `exclude=` takes.

    >>> row = GraphRow("linear", "linear", "head", "model.py:7", "bfloat16", "a matrix product")
    >>> print(GraphPlan((row,)))
    node    where  dtype     reason
    linear  head   bfloat16  a matrix product
    """

    rows: tuple[GraphRow, ...]
    """One row per node with floating-point values."""
    casts: Casts = field(default=Casts(CastBytes(), CastBytes()))
    """The casts before and after the conversion."""

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
        """Return the row of a node; raise `KeyError` if there is none of this name."""
        for row in self.rows:
            if row.node == node:
                return row
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
        """Return the plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> GraphPlan:
        """Read a plan from the values of `to_dict`; raise `CheckpointError` if they are not one."""
        try:
            rows = tuple(
                GraphRow(**{field_.name: _text(row[field_.name]) for field_ in fields(GraphRow)})
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
        raise TypeError(f"expected a string, got {value!r}")
    return value
