"""Rows of op statistics, and how to print them as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mezzo.prepare.plan_rows import format_bytes

_HALF = ("float16", "bfloat16")
_CAST = "_to_copy"
_PRODUCTS = (
    "mm addmm bmm baddbmm mv addmv dot linear linear_backward matmul convolution"
    " convolution_backward convolution_overrideable convolution_backward_overrideable"
    " cudnn_convolution mkldnn_convolution mkldnn_linear _cudnn_rnn _cudnn_rnn_backward"
    " mkldnn_rnn_layer mkldnn_rnn_layer_backward"
).split()
"""Matrix products and convolutions, which tensor cores compute in 16 bits, and fused attention."""
_ATTENTION = "_scaled_dot_product_"
_THOUSAND = 1000


@dataclass(frozen=True, slots=True)
class OpRow:
    """Counts of one op with one dtype in one module."""

    module: str
    """The path of the module; empty for the model itself and for code outside of it."""
    op: str
    """The name of the ATen op, without its overload: `addmm`, `convolution_backward`."""
    dtype: str
    """The dtype of its first floating-point output, or of its first output."""
    calls: int
    casts_in: int
    """Casts between floating-point dtypes whose result was first read by these calls."""
    casts_out: int
    """Casts between floating-point dtypes of the results of these calls."""
    cast_bytes: int
    """Bytes that these casts read and wrote; if the op is a cast itself, its own."""
    casts: int
    """If the op is a cast: the calls that changed a floating-point dtype; others copy or move."""
    inserted: int
    """The casts of these that autocast or mezzo made, not the code of the model."""
    microseconds: float | None = None
    """The time of all calls; None if it was not measured."""

    @property
    def is_cast(self) -> bool:
        """Whether the op casts between floating-point dtypes."""
        return self.op == _CAST or self.casts > 0


COUNTS = ("calls", "casts_in", "casts_out", "cast_bytes", "casts", "inserted")
"""Fields of `OpRow` that are counted as ops run, and summed over modules."""


def format_table(rows: Sequence[OpRow], depth: int = 0) -> str:
    """Return rows as a table with totals, summed over modules below `depth` levels."""
    if not rows:
        return "No ops ran."
    timed = any(row.microseconds is not None for row in rows)
    merged = merge_rows(rows, depth)
    header = ["op", "dtype", "calls", "casts in", "casts out", "cast bytes"]
    header = (["module"] if depth else []) + header + (["time"] if timed else [])
    cells = [_cells(row, depth, timed=timed) for row in merged]
    text = 3 if depth else 2
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, *cells]
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], "", *_totals(rows)])


def merge_rows(rows: Iterable[OpRow], depth: int) -> list[OpRow]:
    """Sum rows over modules below `depth` levels; most time first, or most calls.

    Of modules, in the order in which they first ran.
    """
    merged: dict[tuple[str, str, str], list[OpRow]] = {}
    for row in rows:
        module = ".".join(row.module.split(".")[:depth])
        merged.setdefault((module, row.op, row.dtype), []).append(row)
    order = {key[0]: index for index, key in reversed(list(enumerate(merged)))}
    summed = [_sum(key, same) for key, same in merged.items()]
    return sorted(
        summed, key=lambda row: (order[row.module], -(row.microseconds or 0), -row.calls, row.op)
    )


def _sum(key: tuple[str, str, str], rows: list[OpRow]) -> OpRow:
    times = [row.microseconds for row in rows if row.microseconds is not None]
    sums = {name: sum(getattr(row, name) for row in rows) for name in COUNTS}
    return OpRow(*key, **sums, microseconds=sum(times) if times else None)


def _cells(row: OpRow, depth: int, *, timed: bool) -> list[str]:
    numbers = (row.calls, row.casts_in, row.casts_out)
    cells = [row.op, row.dtype, *(f"{number:,}" if number else "" for number in numbers)]
    cells.append(format_bytes(row.cast_bytes) if row.cast_bytes else "")
    if timed:
        cells.append(_format_time(row.microseconds or 0.0))
    return [row.module or "(model)", *cells] if depth else cells


def _totals(rows: Sequence[OpRow]) -> list[str]:
    computing = [row for row in rows if not row.is_cast and "float" in row.dtype]
    products = [row for row in computing if row.op in _PRODUCTS or row.op.startswith(_ATTENTION)]
    casts = [row for row in rows if row.casts]
    made, inserted = sum(row.casts for row in casts), sum(row.inserted for row in casts)
    cast_bytes = format_bytes(sum(row.cast_bytes for row in casts))
    products_share, share = _share_of_calls(products), _share_of_calls(computing)
    lines = [
        f"total: {sum(row.calls for row in rows):,} calls",
        f"in 16 bits: {products_share} matrix products, {share} floating-point calls without casts",
        f"casts: {made:,}, of them {inserted:,} inserted by autocast; {cast_bytes} moved",
    ]
    times = [row for row in rows if row.microseconds is not None]
    if times:
        total = sum(row.microseconds or 0.0 for row in times)
        in_half = sum(row.microseconds or 0.0 for row in computing if row.dtype in _HALF)
        in_casts = sum(row.microseconds or 0.0 for row in casts)
        shares = [f"{100 * part / total if total else 0:.0f} %" for part in (in_half, in_casts)]
        lines.append(
            f"time: {_format_time(total)}, of it {shares[0]} in 16 bits, {shares[1]} in casts"
        )
    return lines


def _share_of_calls(rows: Sequence[OpRow]) -> str:
    calls = sum(row.calls for row in rows)
    half = sum(row.calls for row in rows if row.dtype in _HALF)
    return f"{half:,} of {calls:,}"


def _format_time(microseconds: float) -> str:
    if microseconds < _THOUSAND:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / _THOUSAND:.2f} ms"
