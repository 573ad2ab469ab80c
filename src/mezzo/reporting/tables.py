"""The tables of a report: skipped steps, layers, ops by dtype, casts, lint findings, events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.observing.log_values import Line, finite, plain_number
from mezzo.prepare.plan_rows import format_bytes
from mezzo.reporting.layers import layer_rows
from mezzo.reporting.run_data import RunData
from mezzo.reporting.verdict import lint_findings

_ROWS = 500
"""Rows of a table; the rest is counted below it."""
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and what it is sorted by."""

    text: str
    order: float | str | None = None

    @property
    def is_number(self) -> bool:
        """Whether the cell is aligned to the right."""
        return isinstance(self.order, float)


@dataclass(frozen=True)
class Table:
    """A table of a page or a terminal."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: int = 0
    """Rows that are not shown."""


def make_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Return a table of texts, numbers and cells."""
    made = [tuple(_cell(value) for value in row) for row in rows]
    return Table(tuple(columns), tuple(made[:_ROWS]), max(len(made) - _ROWS, 0))


def _cell(value: Any) -> Cell:
    if isinstance(value, Cell):
        return value
    if value is None:
        return Cell("–", "")
    found = finite(value)
    if found is None:
        return Cell(str(value), str(value))
    return Cell(plain_number(found), found)


def _percent(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.2%}", float(value))


def _bits(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.1f} bits", float(value))


def _bytes(value: float) -> Cell:
    return Cell(format_bytes(int(value)), float(value))


def skip_table(run: RunData) -> Table:
    """Return the skipped steps and their causes."""
    by_rank = run.world_size > 1
    columns = [
        "step",
        *(["rank"] if by_rank else []),
        "scale",
        "loss",
        "first bad gradient",
        "cause",
    ]
    return make_table(
        columns,
        (
            [
                skip.step,
                *([skip.rank] if by_rank else []),
                skip.scale,
                skip.loss,
                skip.parameter,
                skip.cause,
            ]
            for skip in run.skips
        ),
    )


def layer_table(run: RunData) -> Table:
    """Return overflow, underflow and headroom of each layer."""
    return make_table(
        ("layer", "dtype", "overflowed", "underflow", "zeros", "least headroom", "updates lost"),
        (
            (
                row.name,
                row.dtype,
                row.overflowed,
                _percent(row.underflow),
                _percent(row.zeros),
                _bits(row.headroom),
                _percent(row.lost),
            )
            for row in layer_rows(run)
        ),
    )


def op_rows(run: RunData) -> list[Line]:
    """Return the rows of the last op statistics of the first rank that has them."""
    for log in run.ranks:
        if log.of("ops"):
            rows = log.of("ops")[-1].get("rows")
            return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return []


def op_table(run: RunData) -> Table:
    """Return the calls of each op by dtype, with the casts around it."""
    rows = op_rows(run)
    found = {str(row.get("dtype")) for row in rows}
    dtypes = [*(dtype for dtype in _DTYPES if dtype in found), *sorted(found - set(_DTYPES))]
    timed = any(finite(row.get("microseconds")) is not None for row in rows)
    ops: dict[str, list[Line]] = {}
    for row in rows:
        ops.setdefault(str(row.get("op")), []).append(row)
    ordered = sorted(ops.items(), key=lambda item: -_total(item[1], "calls"))
    return make_table(
        ("op", *dtypes, "casts in", "casts out", "cast bytes", *(["time, µs"] if timed else [])),
        (
            (
                op,
                *(_calls(rows, dtype) for dtype in dtypes),
                _total(rows, "casts_in"),
                _total(rows, "casts_out"),
                _bytes(_total(rows, "cast_bytes")),
                *([_total(rows, "microseconds")] if timed else []),
            )
            for op, rows in ordered
        ),
    )


def cast_table(run: RunData) -> Table:
    """Return the modules and ops with casts, those that move the most bytes first."""
    rows = [
        row
        for row in op_rows(run)
        if (finite(row.get("casts_in")) or 0) + (finite(row.get("casts_out")) or 0) > 0
    ]
    rows.sort(key=lambda row: -(finite(row.get("cast_bytes")) or 0))
    return make_table(
        ("module", "op", "dtype", "casts in", "casts out", "bytes"),
        (
            (
                row.get("module") or "(model)",
                row.get("op"),
                row.get("dtype"),
                finite(row.get("casts_in")) or 0.0,
                finite(row.get("casts_out")) or 0.0,
                _bytes(finite(row.get("cast_bytes")) or 0),
            )
            for row in rows
        ),
    )


def lint_table(run: RunData) -> Table:
    """Return the findings of `mezzo.lint`."""
    return make_table(
        ("rule", "what", "where", "why it costs", "write instead", "gain"),
        (
            [
                *(finding.get(name) for name in ("rule", "what", "where", "why", "instead")),
                None
                if (gain := finite(finding.get("gain"))) is None
                else Cell(f"{gain:.2f}×", gain),
            ]
            for finding in lint_findings(run)
        ),
    )


def event_table(run: RunData) -> Table:
    """Return the events of the run."""
    return make_table(
        ("step", "event", "details"),
        (
            (line.get("step"), line.get("name"), _fields(line.get("fields")))
            for line in run.of("event")
        ),
    )


def _fields(fields: Any) -> str:
    if not isinstance(fields, Mapping):
        return str(fields or "")
    return ", ".join(
        f"{name}: {value}" for name, value in fields.items() if value not in ("", None)
    )


def _total(rows: Iterable[Line], name: str) -> float:
    return sum(finite(row.get(name)) or 0.0 for row in rows)


def _calls(rows: list[Line], dtype: str) -> Cell:
    count = _total((row for row in rows if str(row.get("dtype")) == dtype), "calls")
    return Cell(f"{int(count):,}" if count else "", float(count))
