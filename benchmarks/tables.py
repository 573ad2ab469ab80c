"""Write the README's tables from the stored results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = RESULTS.parent.parent / "README.md"


def table(benchmark: str) -> str:
    """Return a table with a row for each measurement and a column for each machine."""
    records = _records(benchmark)
    names = list(dict.fromkeys(row["name"] for record in records for row in record["rows"]))
    machines = [
        f"{record['machine']}, torch {record['torch'].partition('+')[0]}" for record in records
    ]
    lines = [_line("", "at most", *machines), "|" + "---|" * (2 + len(machines))]
    for name in names:
        rows = [
            next((row for row in record["rows"] if row["name"] == name), None) for record in records
        ]
        bar = next(_value(row, "bar") for row in rows if row)
        lines.append(_line(name, bar, *(_value(row) if row else "–" for row in rows)))
    return "\n".join(lines)


PRECISIONS = ("torch.amp float16", "O1 float16", "O2 float16", "O1 bfloat16", "O2 bfloat16")


def numerics_table() -> str:
    """Return a line for each precision, then one for each training that needs a policy."""
    rows = [row for record in _records("numerics") for row in record["rows"]]
    lines = [_line(f"of {len(rows)} trainings", "pass", "pass with the policy", "most skips of 50")]
    lines.append("|" + "---|" * 4)
    for name in PRECISIONS:
        ran = [row for row in rows if name in row["losses"]]
        plain = sum(_passes(row, row["losses"][name]) for row in ran)
        cured = sum(name in row["cured"] and _passes(row, row["cured"][name]) for row in ran)
        skips = max((row["skips"].get(name, 0) for row in ran), default=0)
        lines.append(_line(name, plain, "–" if name == PRECISIONS[0] else plain + cured, skips))
    return "\n".join([*lines, "", *_cures(rows)])


def _cures(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of the trainings that need a policy, with final losses."""
    lines = [_line("final loss", "float32", *PRECISIONS, "policy"), "|" + "---|" * 8]
    for row in rows:
        if entries := dict.fromkeys(f"`{entry}`" for entry in row["entries"].values()):
            cells = [_loss_cell(row, name) for name in PRECISIONS]
            first = f"{row['float32'][0]:.4g} ± {_tolerance(row):.2g}"
            lines.append(_line(row["name"], first, *cells, " or ".join(entries)))
    return lines


def _tolerance(row: dict[str, Any]) -> float:
    seeds = row["float32"]
    tolerance: float = max(seeds) - min(seeds) + 0.01 * abs(seeds[0])
    return tolerance


def _passes(row: dict[str, Any], loss: float | None) -> bool:
    return loss is not None and abs(loss - row["float32"][0]) <= _tolerance(row)


def _loss_cell(row: dict[str, Any], name: str) -> str:
    """Return a final loss, and after an arrow that with the suggested policy."""
    if name not in row["losses"]:
        return "–"
    losses = [row["losses"][name]] + ([row["cured"][name]] if name in row["cured"] else [])
    return " → ".join("not finite" if loss is None else f"{loss:.4g}" for loss in losses)


TORCH = ("torch.amp", "torch by hand")


def models_table() -> str:
    """Return a table with a row for each model, then one of the other measurements."""
    rows = [row for record in _records("models") for row in record["rows"]]
    header = ("ms", *TORCH, "mezzo", *(f"of {name} (at most)" for name in TORCH))
    lines = [_line(*header), "|" + "---|" * len(header)]
    lines += [_model_line(row) for row in rows if "ratios" in row]
    if others := [row for row in rows if "ratios" not in row]:
        lines += ["", _line("", "at most", "measured"), "|---|---|---|"]
        lines += [_line(row["name"], _value(row, "bar"), _value(row)) for row in others]
    return "\n".join(lines)


def _model_line(row: dict[str, Any]) -> str:
    """Return the times and the ratios of a model; by hand, the fastest time counts."""
    times = [
        min((time for key, time in row["times"].items() if key.startswith(name)), default=None)
        for name in (*TORCH, "mezzo")
    ]
    ratios = [
        f"{row['ratios'][name]:.2f} ({row['bars'][name]:g})" if name in row["ratios"] else "–"
        for name in TORCH
    ]
    name = row["name"] + ("" if row["captured"] else " (not captured)")
    return _line(name, *("–" if time is None else f"{time / 1e3:.2f}" for time in times), *ratios)


def long_run_table() -> str:
    """Return a table with a row for each precision of the long training."""
    (record,) = _records("long_run")
    title = f"{record['steps']:,} steps of {record['tokens a step']:,} tokens"
    header = (title, "loss at the end", "on unseen text", "skipped updates", "seconds")
    lines = [_line(*header), "|" + "---|" * len(header)]
    for name, run in record["runs"].items():
        cells = (f"{run['curve'][-1]:.3f}", f"{run['validation']:.3f}")
        lines.append(_line(name, *cells, run["skipped"], f"{run['seconds']:.0f}"))
    return "\n".join(lines)


def _records(benchmark: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{benchmark}-*.json"))]


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _value(row: dict[str, Any], field: str = "value") -> str:
    return f"{row[field]:.3g} {row['unit']}".rstrip()


TABLES: dict[str, Callable[[], str]] = {
    "numerics": numerics_table,
    "models": models_table,
    "long_run": long_run_table,
}
"""Tables with a form of their own by the names of their benchmarks."""


def main() -> None:
    """Replace the text between each pair of markers in the README."""
    text = README.read_text()
    marked = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    README.write_text(marked.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text))
    print(f"tables written to {README.name}")


def _table(benchmark: str) -> str:
    return TABLES[benchmark]() if benchmark in TABLES else table(benchmark)


if __name__ == "__main__":
    main()
