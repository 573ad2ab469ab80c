"""The tables of `mezzo compare`: modes of a run, modes on several machines, documents' numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.verdict import INFERENCE, fastest_mode
from mezzo.prepare.plan_rows import format_bytes
from mezzo.reporting.tables import Cell, Table, make_table

_Column = Callable[[ModeResult, Comparison], Cell | None]


def mode_table(comparison: Comparison) -> Table:
    """Return a row for each mode, without the columns that no mode has a value for.

    >>> result = Comparison("mlp", "MLP", "small", "synthetic", "CPU", "2.13", "0.1.0", 10, 5, (
    ...     ModeResult("float32", milliseconds=6.0), ModeResult("O1", "bfloat16", 3.0)))
    >>> table = mode_table(result)
    >>> table.columns, [cell.text for cell in table.rows[1]]
    (('mode', 'dtype', 'ms', '× float32'), ['O1', 'bfloat16', '3.00', '2.00'])
    """
    cells = {
        name: [column(mode, comparison) for mode in comparison.modes]
        for name, column in _COLUMNS.items()
    }
    shown = {name: column for name, column in cells.items() if any(column)}
    return make_table(shown, zip(*shown.values(), strict=True))


def machine_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the time of each mode of a workload on each machine, and its ratio to float32."""
    names = dict.fromkeys(mode.mode for result in comparisons for mode in result.modes)
    rows = [(name, *(_on_machine(name, result) for result in comparisons)) for name in names]
    return make_table(
        ("ms (× float32)", *map(machine_name, comparisons)),
        [row for row in rows if any(row[1:])],
    )


def documented_table(comparisons: Sequence[Comparison]) -> Table:
    """Return how many times as fast as float32 documents report a mode, and what was measured."""
    documented = dict.fromkeys(document for result in comparisons for document in result.documented)
    return make_table(
        ("document", "mode", "document: × float32", *map(machine_name, comparisons)),
        [
            (
                document.source,
                document.mode,
                _times(document.speedup),
                *(_speedup(document.mode, result) for result in comparisons),
            )
            for document in documented
        ],
    )


def summary_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row for each workload and machine: float32, the fastest mode, its memory."""
    return make_table(
        (
            "workload",
            "sizes",
            "machine",
            "float32, ms",
            "fastest mode",
            "ms",
            "× float32",
            "memory",
        ),
        [_summary_row(comparison) for comparison in comparisons],
    )


def _summary_row(comparison: Comparison) -> tuple[object, ...]:
    base, mode = comparison.mode(comparison.baseline), fastest_mode(comparison)
    name = (comparison.workload, comparison.title, machine_name(comparison))
    start = (*name, _time(base.milliseconds) if base else None)
    if base is None or mode is None:
        return (*start, None, None, None, None)
    title = f"{mode.mode} {mode.dtype or ''}".strip()
    memory = mode.peak_bytes / base.peak_bytes if mode.peak_bytes and base.peak_bytes else None
    times = (_time(mode.milliseconds), _speedup(mode.mode, comparison))
    return (*start, title, *times, None if memory is None else Cell(f"{memory:.2f} ×", memory))


def machine_name(comparison: Comparison) -> str:
    """Return the machine of a result, with the version of torch and the size of the workload."""
    torch = comparison.torch.partition("+")[0]
    size = "" if comparison.preset == "full" else f", {comparison.preset}"
    return f"{comparison.machine}, torch {torch}{size}"


def _on_machine(name: str, comparison: Comparison) -> Cell | None:
    mode = comparison.mode(name)
    if mode is None or mode.milliseconds is None:
        return None
    speedup = _speedup(name, comparison)
    ratio = f" ({speedup.text})" if speedup and name != comparison.baseline else ""
    return Cell(f"{milliseconds(mode.milliseconds)}{ratio}", mode.milliseconds)


def milliseconds(value: float) -> str:
    """Return a time with three digits.

    >>> milliseconds(0.01234), milliseconds(1.5), milliseconds(321.5)
    ('0.0123', '1.50', '322')
    """
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(digits, 0)}f}"


def _speedup(name: str, comparison: Comparison) -> Cell | None:
    # The time of a converted model is that of a forward pass, that of float32 of a whole step.
    found = None if name == INFERENCE else comparison.speedup(name)
    return None if found is None else _times(found)


def _times(value: float) -> Cell:
    return Cell(f"{value:.2f}", float(value))


def _text(value: str | None) -> Cell | None:
    return Cell(value, value) if value else None


def _bytes(value: int | None) -> Cell | None:
    return None if value is None else Cell(format_bytes(value), float(value))


def _count(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:,.0f}", float(value))


def _time(value: float | None) -> Cell | None:
    return None if value is None else Cell(milliseconds(value), float(value))


def _loss(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.4g}", float(value))


def _difference(mode: ModeResult, comparison: Comparison) -> Cell | None:
    base = comparison.mode(comparison.baseline)
    if mode.mode == comparison.baseline or base is None or mode.loss is None or base.loss is None:
        return None
    difference = mode.loss - base.loss
    return Cell(f"{difference:+.2g}", float(difference))


def _percent(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.1%}", float(value))


_COLUMNS: dict[str, _Column] = {
    "mode": lambda mode, _: _text(mode.mode),
    "dtype": lambda mode, _: _text(mode.dtype),
    "ms": lambda mode, _: _time(mode.milliseconds),
    "× float32": lambda mode, comparison: _speedup(mode.mode, comparison),
    "samples/s": lambda mode, _: _count(mode.samples_per_second),
    "memory": lambda mode, _: _bytes(mode.peak_bytes),
    "kept for backward": lambda mode, _: _bytes(mode.saved_bytes),
    "casts": lambda mode, _: _count(mode.casts),
    "loss": lambda mode, _: _loss(mode.loss),
    "− float32": _difference,
    "skipped": lambda mode, _: _count(mode.skipped),
    "accuracy": lambda mode, _: _percent(mode.accuracy),
    "note": lambda mode, _: _text(mode.note),
}
"""Columns of the table of one run."""
