"""Write the README's tables from the stored results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

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


def main() -> None:
    """Replace the text between each pair of markers in the README."""
    text = README.read_text()
    marked = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    README.write_text(marked.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", text))
    print(f"tables written to {README.name}")


if __name__ == "__main__":
    main()
