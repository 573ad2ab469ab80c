"""Write the README's tables from the stored results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = RESULTS.parent.parent / "README.md"


def table(benchmark: str) -> str:
    """Return a table with a row for each measurement and a column for each machine."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{benchmark}-*.json"))]
    names = list(dict.fromkeys(row["name"] for record in records for row in record["rows"]))
    header = [
        "",
        "at most",
        *(f"{record['machine']}, torch {record['torch'].partition('+')[0]}" for record in records),
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name in names:
        rows = [
            next((row for row in record["rows"] if row["name"] == name), None) for record in records
        ]
        first = next(row for row in rows if row)
        cells = [f"{row['value']:.3g} {row['unit']}" if row else "–" for row in rows]
        lines.append(
            "| " + " | ".join([name, f"{first['bar']:.3g} {first['unit']}", *cells]) + " |"
        )
    return "\n".join(lines)


PRECISIONS = ("torch.amp float16", "O1 float16", "O2 float16", "O1 bfloat16", "O2 bfloat16")


def numerics_table() -> str:
    """Return a table with a row for each training and a column for each precision."""
    header = ["final loss", "float32", "±", *PRECISIONS, "with"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for path in sorted(RESULTS.glob("numerics-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            first, spread = row["float32"][0], max(row["float32"]) - min(row["float32"])
            entries = " or ".join(dict.fromkeys(f"`{one}`" for one in row["entries"].values()))
            cells = [_loss_cell(row, name) for name in PRECISIONS]
            tolerance = spread + 0.01 * abs(first)
            lines.append(
                "| "
                + " | ".join([row["name"], f"{first:.4g}", f"{tolerance:.2g}", *cells, entries])
                + " |"
            )
    return "\n".join(lines)


def _loss_cell(row: dict[str, Any], name: str) -> str:
    """Return a final loss, and after an arrow that with the suggested policy."""
    if name not in row["losses"]:
        return "–"
    losses = [row["losses"][name]] + ([row["cured"][name]] if name in row["cured"] else [])
    return " → ".join("not finite" if loss is None else f"{loss:.4g}" for loss in losses)


def main() -> None:
    """Replace the text between each pair of markers in the README."""
    text = README.read_text()
    marked = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    README.write_text(marked.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text))
    print(f"tables written to {README.name}")


def _table(benchmark: str) -> str:
    return numerics_table() if benchmark == "numerics" else table(benchmark)


if __name__ == "__main__":
    main()
