"""Summarize a run for a terminal: the verdict, its numbers and the worst layers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, TextIO

from mezzo.reporting import tables
from mezzo.reporting.figures import key_figures
from mezzo.reporting.layers import layer_rows
from mezzo.reporting.policy_diff import policy_changes
from mezzo.reporting.run_data import RunData, Source, read_run
from mezzo.reporting.verdict import Status, judge

_ROWS = 8
"""Rows of each table."""
_UNDERFLOW = 1e-4
"""Share of a layer's gradients that underflow from which on it is listed."""
_STYLES = {
    Status.GOOD: "bold green",
    Status.WATCH: "bold yellow",
    Status.BAD: "bold red",
    Status.EMPTY: "bold",
}


def summary(log: Source) -> str:
    """Return a summary of a run as plain text.

    >>> import mezzo, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with mezzo.observe(model) as run, torch.autocast("cpu"):
    ...     output = model(torch.ones(1, 2))
    >>> print(summary(run).splitlines()[0])
    Healthy: 1 step in bfloat16, no step was skipped.
    """
    run = read_run(log)
    verdict = judge(run)
    lines = [verdict.sentence, *(f"  - {fact}" for fact in verdict.facts), "", _numbers(run)]
    for title, table in _tables(run):
        lines += ["", title, *_aligned(table)]
    return "\n".join([*lines, *_changes(run)])


def summary_data(log: Source) -> dict[str, Any]:
    """Return the verdict, the key figures, the skips and the suggested policies as plain data."""
    run = read_run(log)
    verdict = judge(run)
    return {
        "status": verdict.status.value,
        "verdict": verdict.sentence,
        "facts": list(verdict.facts),
        "figures": {figure.name: figure.value for figure in key_figures(run)},
        "skips": [asdict(skip) for skip in run.skips],
        "policies": [asdict(change) for change in policy_changes(run)],
    }


def print_summary(log: Source, file: TextIO | None = None) -> None:
    """Print the summary of a run, in color where rich is installed and the output is a terminal."""
    file = file or sys.stdout
    if find_spec("rich") is None or not file.isatty():
        print(summary(log), file=file)
        return
    _print_in_color(read_run(log), file)


def _print_in_color(run: RunData, file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=file)
    verdict = judge(run)
    # As `Text`, because names may contain what rich reads as markup.
    console.print(Text(verdict.sentence, style=_STYLES[verdict.status]))
    for fact in verdict.facts:
        console.print(Text(f"  - {fact}"))
    console.print(Text(_numbers(run), style="dim"))
    for title, table in _tables(run):
        shown = RichTable(title=Text(title), title_justify="left", box=None, pad_edge=False)
        for column in table.columns:
            shown.add_column(Text(column, style="dim"), overflow="fold")
        for row in table.rows[:_ROWS]:
            shown.add_row(*(Text(cell.text) for cell in row))
        console.print()
        console.print(shown)
    for line in _changes(run):
        console.print(Text(line))


def _numbers(run: RunData) -> str:
    return ", ".join(f"{figure.name} {figure.value}" for figure in key_figures(run))


def _tables(run: RunData) -> Iterable[tuple[str, tables.Table]]:
    skips = tables.skip_table(run)
    if skips.rows:
        yield f"Skipped steps ({len(run.skips)})", skips
    rows = [row for row in layer_rows(run) if (row.underflow or 0) >= _UNDERFLOW]
    rows.sort(key=lambda row: (-(row.underflow or 0.0), row.name))
    if rows:
        yield (
            "Layers whose gradients underflow most",
            tables.make_table(
                ("layer", "underflow", "overflowed"),
                ((row.name, f"{row.underflow or 0:.2%}", row.overflowed) for row in rows),
            ),
        )
    lint = tables.lint_table(run)
    if lint.rows:
        yield "Lint", tables.Table(lint.columns[:3], tuple(row[:3] for row in lint.rows))


def _aligned(table: tables.Table) -> list[str]:
    cells = [list(table.columns), *([cell.text for cell in row] for row in table.rows[:_ROWS])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    rest = len(table.rows) + table.left_out - _ROWS
    return [*lines, *([f"  and {rest} more"] if rest > 0 else [])]


def _changes(run: RunData) -> list[str]:
    changes: list[Any] = policy_changes(run)
    lines = ["", "Suggested policy"] if changes else []
    for change in changes:
        lines += [f"  - {change.before}"] if change.before else []
        lines += [f"  + {change.after}{' (verified)' if change.verified else ''}"]
    return lines
