"""Write the tables of the README and of docs from stored results: `python benchmarks/tables.py`.

A table stands between two markers, `<!-- benchmarks: step -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = RESULTS.parent.parent
PAGES = ("README.md", "docs/index.md", "docs/performance.md", "docs/tensor-cores.md")
"""Pages with tables, below the root of the repository."""


def table(benchmark: str) -> str:
    """Return a table with a row for each measurement and a column for each machine."""
    records = _records(benchmark)
    names = list(dict.fromkeys(row["name"] for record in records for row in record["rows"]))
    machines = [_machine(record) for record in records]
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
FLOAT32 = ("float32", "TF32")
"""Times that are shown where they were measured: `models.py --float32`."""


def models_table() -> str:
    """Return a table with a row for each model, then one of the other measurements."""
    rows = [row for record in _records("models") for row in record["rows"]]
    timed = [name for name in FLOAT32 if any(name in row["times"] for row in rows)]
    shown = (*timed, *TORCH, "mezzo")
    header = ("ms", *shown, *(f"of {name} (at most)" for name in TORCH))
    lines = [_line(*header), "|" + "---|" * len(header)]
    lines += [_model_line(row, shown) for row in rows if "ratios" in row]
    if others := [row for row in rows if "ratios" not in row]:
        lines += ["", _line("", "at most", "measured"), "|---|---|---|"]
        lines += [_line(row["name"], _value(row, "bar"), _value(row)) for row in others]
    return "\n".join(lines)


def _model_line(row: dict[str, Any], shown: tuple[str, ...]) -> str:
    """Return the times and the ratios of a model; by hand, the fastest time counts."""
    times = [
        min((time for key, time in row["times"].items() if key.startswith(name)), default=None)
        for name in shown
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


def shapes_table() -> str:
    """Return a table of sizes beside multiples of 8 for each machine; empty without results."""
    parts = []
    for record in _records("shapes"):
        dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
        header = (_machine(record), "instead of", *dtypes)
        lines = [_line(*header), "|" + "---|" * len(header)]
        for pair in dict.fromkeys((row["size"], row["than"]) for row in record["rows"]):
            rows = [row for row in record["rows"] if (row["size"], row["than"]) == pair]
            gains = {row["dtype"]: _gain(row) for row in rows}
            lines.append(_line(*pair, *(gains.get(dtype, "–") for dtype in dtypes)))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _gain(row: dict[str, Any]) -> str:
    before, after = (row["times"][name] / 1e3 for name in (row["than"], row["size"]))
    return f"{before:.3f} → {after:.3f} ms ({before / after:.2f} ×)"


def highlights_table() -> str:
    """Return the six numbers of the README."""
    steps = {row["name"]: row["times"] for row in _rows("step")}
    lines = [_line("on one NVIDIA H200", "torch", "mezzo"), "|---|---|---|"]
    for name in ("ResNet-50, 224², batch 128", "GPT-2 124M, 8 × 1024, AdamW"):
        times = steps[f"step, {name}, against torch.amp"]
        cells = (f"{times[who] / 1e3:.1f} ms" for who in ("torch.amp", "mezzo"))
        lines.append(_line(f"a training step in float16: {name}", *cells))
    times = steps["step, GPT-2 124M, 8 × 1024, AdamW, against torch by hand"]
    by_hand = min(time for name, time in times.items() if name.startswith(TORCH[1]))
    cells = (f"{time / 1e3:.1f} ms" for time in (by_hand, times["mezzo"]))
    lines.append(_line("the same against torch compiled and captured by hand", *cells))
    return "\n".join([*lines, _adamw_line(), _trainings_line(), _faults_line()])


def _adamw_line() -> str:
    """Return the time of the fused step, from the table of optimizers."""
    name = "AdamW with clipping, 1B, bfloat16, split"
    times = next(row["times"] for row in _rows("optim") if row["name"] == name)
    cells = (f"{times[who] / 1e3:.1f} ms" for who in ("torch.amp", "mezzo O2"))
    return _line("AdamW with clipping, 1B parameters, bfloat16, split masters", *cells)


def _trainings_line() -> str:
    """Return how many trainings end with the loss of float32, as the table of numerics counts."""
    rows = _rows("numerics")
    plain = sum(_passes(row, row["losses"][PRECISIONS[0]]) for row in rows)
    name = "O2 float16"
    ours = sum(_passes(row, row["cured"].get(name, row["losses"].get(name))) for row in rows)
    title = f"of {len(rows)} small trainings, as good as float32 (mezzo: with the policy it finds)"
    return _line(title, plain, ours)


def _faults_line() -> str:
    rows = _rows("faults")
    right = sum(row["value"] <= row["bar"] for row in rows)
    return _line(
        f"of {len(rows)} planted faults, op, module, line and remedy named right", "–", right
    )


def _rows(benchmark: str) -> list[dict[str, Any]]:
    """Return the rows that were measured on the H200."""
    record = json.loads((RESULTS / f"{benchmark}-nvidia-h200.json").read_text())
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def _machine(record: dict[str, Any]) -> str:
    return f"{record['machine']}, torch {record['torch'].partition('+')[0]}"


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
    "shapes": shapes_table,
    "highlights": highlights_table,
}
"""Tables with a form of their own by the names of their benchmarks."""


def fill(text: str) -> str:
    """Return a page with the text between each pair of markers replaced by the table."""
    marked = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text)


def _table(benchmark: str) -> str:
    return TABLES[benchmark]() if benchmark in TABLES else table(benchmark)


def main() -> None:
    """Write the tables of all pages."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(fill(page.read_text()))
        print(f"tables written to {name}")


if __name__ == "__main__":
    main()
