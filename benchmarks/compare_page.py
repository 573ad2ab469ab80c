"""Write the tables and curves of docs/compare.md: `python benchmarks/compare_page.py`.

They are made from the stored results of `mezzo compare`: `benchmarks/results/compare-*.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from internals import (
    Comparison,
    Documented,
    Table,
    color_of,
    documented_numbers,
    machine_name,
    machine_table,
    mode_table,
    stored_results,
    verdict,
)

RESULTS = Path(__file__).parent / "results"
DOCS = RESULTS.parents[1] / "docs"
NOTHING = "No machine has stored results yet."
LEFT, RIGHT, WIDTH, HEIGHT = 64, 696, 720, 450
TICKS = 5


# -- tables ----------------------------------------------------------------------------------------


def tables(results: Sequence[Comparison], documented: Mapping[str, Sequence[Documented]]) -> str:
    """Return the numbers of documents beside the measured ones, then the tables of workloads."""
    parts = [documents(results, documented)]
    for name in dict.fromkeys(result.workload for result in results):
        parts += workload_section([result for result in results if result.workload == name])
    return "\n\n".join([*parts, *([] if results else [NOTHING])])


def documents(results: Sequence[Comparison], documented: Mapping[str, Sequence[Documented]]) -> str:
    """Return a line for each number of a document, with a column for each machine that has some."""
    reported = {
        **documented,
        **{one.workload: one.documented for one in results if one.documented},
    }
    machines = list(dict.fromkeys(one.machine for one in results if one.workload in reported))
    header = ("workload", "mode", "document: × float32", *machines)
    lines = [_line(header), _rule(header)]
    for workload, numbers in reported.items():
        for one in numbers:
            measured = [_measured(results, workload, one.mode, machine) for machine in machines]
            document = f"{one.speedup:g} ({one.source})"
            lines.append(_line((f"`{workload}`", one.mode, document, *measured)))
    return "\n".join(lines)


def _measured(results: Iterable[Comparison], workload: str, mode: str, machine: str) -> str:
    for result in results:
        if (result.workload, result.machine) == (workload, machine):
            speedup = result.speedup(mode)
            if speedup is not None:
                return f"{speedup:.2f}" + ("" if result.preset == "full" else " (small)")
    return "–"


def workload_section(results: Sequence[Comparison]) -> list[str]:
    """Return the parts about one workload: machines beside each other, then each by itself."""
    parts = [f"### `{_escaped(results[0].workload)}`"]
    if len(results) > 1:
        parts.append(_markdown(machine_table(results)))
    for result in results:
        notes = [f"- {one.mode}: {_escaped(one.note)}" for one in result.modes if one.note]
        where = f"data: {result.data}; {machine_name(result)}; {result.steps:,} steps."
        parts += [
            f"**{_escaped(result.title)}**; {_escaped(where)}",
            _markdown(_without_notes(mode_table(result))),
            *(["\n".join(notes)] if notes else []),
            _escaped(verdict(result)),
        ]
        if has_curves(result):
            title = _escaped(f"Curves of {result.workload} on {result.machine}")
            parts.append(f"![{title}]({image(result)})")
    return parts


def _without_notes(table: Table) -> Table:
    if table.columns[-1:] != ("note",):
        return table
    return replace(table, columns=table.columns[:-1], rows=tuple(row[:-1] for row in table.rows))


def _markdown(table: Table) -> str:
    rows = [_line(cell.text for cell in row) for row in table.rows]
    return "\n".join([_line(table.columns), _rule(table.columns), *rows])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _rule(cells: Sequence[str]) -> str:
    return "|" + "---|" * len(cells)


def _escaped(text: str) -> str:
    """Return a text of a result as it can stand in a page."""
    return " ".join(text.replace("<", "&lt;").replace("|", "\\|").split())


# -- curves ----------------------------------------------------------------------------------------


def has_curves(result: Comparison) -> bool:
    """Return whether a result has an accuracy for each epoch."""
    return any(len(mode.accuracy_curve) > 1 for mode in result.modes)


def image(result: Comparison) -> str:
    """Return where the curves of a result are, below docs."""
    size = "" if result.preset == "full" else result.preset
    text = f"{result.workload} {result.machine} {size}".lower()
    name = re.sub(r"[^a-z0-9]+", "-", text).strip("-")
    return f"images/compare-{name}.svg"


def plot(result: Comparison) -> str:
    """Return accuracy and loss of each mode over the epochs as an SVG."""
    modes = [mode for mode in result.modes if mode.accuracy_curve]
    accuracies = {mode.mode: [100 * one for one in mode.accuracy_curve] for mode in modes}
    losses = {mode.mode: list(mode.loss_curve) for mode in modes}
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="sans-serif" font-size="12" fill="#808080"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            *_legend(accuracies),
            *_panel(accuracies, "accuracy, %", 56, 216),
            *_panel(losses, "loss", 256, 406),
            f'<text x="{(LEFT + RIGHT) / 2:g}" y="442" text-anchor="middle">epoch</text>',
            "</svg>\n",
        ]
    )


def _legend(names: Iterable[str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x, y = LEFT + 160 * (index % 4), 14 + 20 * (index // 4)
        parts.append(f'<path d="M{x} {y}h18" stroke="{color_of(name)}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="{y + 4}">{_escaped(name)}</text>')
    return parts


def _panel(curves: Mapping[str, Sequence[float]], label: str, top: int, bottom: int) -> list[str]:
    """Return one diagram: grid lines, their values, an axis label, the curves and the epochs."""
    values = [one for curve in curves.values() for one in curve if abs(one) < float("inf")]
    low, high = min(values, default=0.0), max(values, default=1.0)
    high = high if high > low else low + 1
    epochs = max((len(curve) for curve in curves.values()), default=1)

    def place(epoch: int, value: float) -> tuple[float, float]:
        share = (value - low) / (high - low)
        return LEFT + epoch / max(epochs - 1, 1) * (RIGHT - LEFT), bottom - share * (bottom - top)

    parts = []
    for index in range(TICKS):
        tick = low + (high - low) * index / (TICKS - 1)
        y = place(0, tick)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#8884" fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    middle = f"translate(14 {(top + bottom) / 2:g}) rotate(-90)"
    parts.append(f'<text transform="{middle}" text-anchor="middle">{label}</text>')
    for name, curve in curves.items():
        places = [place(*one) for one in enumerate(curve) if abs(one[1]) < float("inf")]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = f'fill="none" stroke="{color_of(name)}" stroke-width="1.6"'
        parts.append(f'<polyline points="{points}" {style}/>')
    for epoch in range(0, epochs, max(epochs // 10, 1)):
        x = place(epoch, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{epoch + 1}</text>')
    return parts


def main(results: Path = RESULTS, docs: Path = DOCS) -> None:
    """Write the curves, and the tables between their markers."""
    found = stored_results(results)
    (docs / "images").mkdir(exist_ok=True)
    for result in filter(has_curves, found):
        (docs / image(result)).write_text(plot(result))
    page = docs / "compare.md"
    marked = re.compile(r"(<!-- benchmarks: compare -->\n).*?(<!-- end -->)", re.DOTALL)
    made = tables(found, documented_numbers())
    page.write_text(marked.sub(lambda one: f"{one[1]}\n{made}\n\n{one[2]}", page.read_text()))
    print(f"tables of {len(found)} results written to {page.name}")


if __name__ == "__main__":
    main()
