"""Write the table and the plot of the long run into docs/: `python benchmarks/long_run_page.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "long_run-nvidia-h200.json"
DOCS = RECORD.parents[2] / "docs"
COLORS = {
    "float32": "#8a8a8a",
    "O1 float16": "#e8871e",
    "O2 float16": "#3b82d6",
    "O2 bfloat16": "#2f9e6e",
}
"""Colours that can be read on a light and on a dark page."""
LEFT, RIGHT, WIDTH = 76, 696, 720


def table(runs: Mapping[str, Any]) -> str:
    """Return the table of a long run, a row for each precision."""
    rows = [
        f"| {name} | {run['curve'][-1]:.4f} | {run['validation']:.4f} | {run['skipped']}"
        f" | {run['seconds']:.1f} s |"
        for name, run in runs.items()
    ]
    header = "| | last loss | unseen text | skipped updates | time |\n|---|---|---|---|---|"
    return "\n".join([header, *rows])


def panel(
    curves: Mapping[str, Sequence[float]],
    ticks: Sequence[float],
    label: str,
    top: int,
    bottom: int,
    steps: int,
) -> list[str]:
    """Return one diagram: grid lines at the ticks, their values, an axis label, the curves."""
    low, high = min(ticks), max(ticks)

    def height(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    parts = []
    for tick in ticks:
        y = height(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#8884" fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle:g}) rotate(-90)" text-anchor="middle">'
        f"{label}</text>"
    )
    for name, curve in curves.items():
        # Each point is the mean of the steps around it.
        width = (RIGHT - LEFT) / len(curve)
        points = " ".join(
            f"{LEFT + (index + 0.5) * width:.1f},{height(value):.1f}"
            for index, value in enumerate(curve)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="1.6"/>'
        )
    for step in range(0, steps + 1, 1000):
        x = LEFT + step / steps * (RIGHT - LEFT)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    return parts


def plot(record: Mapping[str, Any]) -> str:
    """Return the curves as an SVG: the losses, and below them how far they are from float32."""
    curves = {name: run["curve"] for name, run in record["runs"].items()}
    exact = curves["float32"]
    apart = {
        name: [one - other for one, other in zip(curve, exact, strict=True)]
        for name, curve in curves.items()
    }
    legend = []
    for index, (name, color) in enumerate(COLORS.items()):
        x = LEFT + 150 * index
        legend.append(f'<path d="M{x} 18h18" stroke="{color}" stroke-width="3"/>')
        legend.append(f'<text x="{x + 24}" y="22">{name}</text>')
    size = f'viewBox="0 0 {WIDTH} 440" width="{WIDTH}" height="440"'
    font = 'font-family="sans-serif" font-size="12" fill="#808080"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            *legend,
            *panel(curves, [0, 1, 2, 3, 4], "loss", 40, 240, record["steps"]),
            *panel(
                apart,
                [-0.012, -0.006, 0, 0.006, 0.012],
                "loss − float32",
                280,
                390,
                record["steps"],
            ),
            f'<text x="{(LEFT + RIGHT) / 2:g}" y="430" text-anchor="middle">step</text>',
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write the plot, and the table between its markers."""
    record = json.loads(RECORD.read_text())
    (DOCS / "long-run.svg").write_text(plot(record))
    page = DOCS / "numerics.md"
    marked = re.compile(r"(<!-- long run -->\n).*?(<!-- end -->)", re.DOTALL)
    page.write_text(
        marked.sub(lambda found: f"{found[1]}{table(record['runs'])}\n{found[2]}", page.read_text())
    )


if __name__ == "__main__":
    main()
