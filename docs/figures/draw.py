"""Draw the figures of docs/how-it-works.md: `python docs/figures/draw.py`.

Colours can be read on light and on dark pages, so that one file does for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "images"
RECORD = Path(__file__).with_name("gradients.json")

WIDTH = 720
TEXT = "#7d838c"
HALF, FULL, BITS, LOST = "#d9731a", "#3b78c9", "#3f9c6d", "#c94f4f"
"""16 bits, float32, the fraction bits of a format, and values that are lost."""


@dataclass(frozen=True)
class Format:
    """A floating-point format: its bits, and the exponents of its range."""

    name: str
    exponent: int
    fraction: int
    stored: int
    largest: float
    digits: str

    @property
    def smallest(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent - 1)


FORMATS = (
    Format("float32", 8, 23, 32, 128, "7 digits"),
    Format("TF32", 8, 10, 32, 128, "3 digits"),
    Format("bfloat16", 8, 7, 16, 128, "2 digits"),
    Format("float16", 5, 10, 16, 16, "3 digits"),
)


def text(x: float, y: float, content: str, **style: Any) -> str:
    """Return a line of text; `anchor`, `color`, `size` and `weight` change its look."""
    weight = f' font-weight="{style["weight"]}"' if "weight" in style else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{style.get("anchor", "start")}"'
        f' fill="{style.get("color", TEXT)}" font-size="{style.get("size", 13)}"{weight}>'
        f"{content}</text>"
    )


def box(x: float, y: float, width: float, height: float, color: str, **style: Any) -> str:
    """Return a rectangle; `opacity` and `radius` change its look."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"'
        f' fill-opacity="{style.get("opacity", 1):g}" rx="{style.get("radius", 1):g}"/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow, horizontal or vertical."""
    return (
        f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{TEXT}" stroke-width="1.5"'
        ' fill="none" marker-end="url(#head)"/>'
    )


HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    f' orient="auto"><path d="M0 0L8 4L0 8z" fill="{TEXT}"/></marker></defs>'
)


def figure(height: int, title: str, *parts: str) -> str:
    """Return an SVG with its title, which screen readers read."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">',
            f"<title>{title}</title>",
            *parts,
            "</svg>\n",
        ]
    )


def bit_rows() -> Iterator[str]:
    """Yield the bits of each format, a square each."""
    left, size = 92, 16.5
    for row, one in enumerate(FORMATS):
        y = 34 + row * 34
        yield text(left - 12, y + 13, one.name, anchor="end", weight="bold")
        for bit in range(one.stored):
            used = 1 + one.exponent + one.fraction
            color = TEXT if bit == 0 else HALF if bit <= one.exponent else BITS
            opacity = 0.15 if bit >= used else 1
            yield box(left + bit * size, y, size - 2, 18, color, opacity=opacity, radius=2)
        label = f"{one.exponent} + {one.fraction}"
        yield text(left + one.stored * size + 6, y + 13, label)
    for place, (color, name) in enumerate(
        [(TEXT, "sign"), (HALF, "exponent: range"), (BITS, "fraction: digits")]
    ):
        x = left + 150 * place - 30 * (place > 0)
        yield box(x, 8, 12, 12, color, radius=2)
        yield text(x + 18, 19, name, size=12)


def range_rows() -> Iterator[str]:
    """Yield the range of each format on a logarithmic axis; subnormal numbers are pale."""
    left, right, top = 92, 640, 206

    def place(exponent: float) -> float:
        return left + (exponent + 150) / 280 * (right - left)

    for row, one in enumerate(FORMATS):
        y = top + row * 30
        low, high = place(one.smallest), place(one.largest)
        faint = place(one.smallest - one.fraction)
        yield text(left - 12, y + 13, one.name, anchor="end", weight="bold")
        yield box(faint, y, low - faint, 16, FULL, opacity=0.35)
        yield box(low, y, high - low, 16, FULL)
        yield text(right + 12, y + 13, one.digits)
    bottom = top + 4 * 30
    for power in range(-40, 41, 10):
        x = place(power * 3.321928)
        yield f'<path d="M{x:.1f} {top - 6}V{bottom}" stroke="{TEXT}" stroke-opacity="0.3"/>'
        yield text(
            round(x, 1), bottom + 14, f"1e{power}" if power else "1", anchor="middle", size=12
        )


def formats() -> str:
    """Return the figure of the formats: their bits, and their ranges."""
    return figure(
        350, "Bits and ranges of float32, TF32, bfloat16, float16", *bit_rows(), *range_rows()
    )


def node(x: float, y: float, color: str, *lines: str, width: float = 112) -> str:
    """Return a box with lines of text, the first of them bold."""
    height = 44
    parts = [box(x, y, width, height, color, radius=5)]
    for number, line in enumerate(lines):
        weight = {"weight": "bold"} if number == 0 else {}
        size = 13 if number == 0 else 11.5
        line_y = y + (27 if len(lines) == 1 else 19 + 16 * number)
        parts.append(
            text(x + width / 2, line_y, line, anchor="middle", color="#fff", size=size, **weight)
        )
    return "\n".join(parts)


def lane(top: int, title: str, forward: list[Any], backward: list[Any]) -> Iterator[str]:
    """Yield the forward pass of one level in a row, and its backward pass and update below."""
    columns, bottom = (16, 160, 304, 448, 592), top + 116
    yield text(16, top - 14, title, weight="bold", size=14)
    for x, content in zip(columns, forward, strict=True):
        if content:
            yield node(x, top, *content)
    for x, content in zip(columns, backward, strict=True):
        if content:
            yield node(x, bottom, *content)
    places = [x for x, content in zip(columns, forward, strict=True) if content]
    for x, following in pairwise(places):
        yield arrow(x + 112, top + 22, following, top + 22)
    yield arrow(648, top + 44, 648, bottom)
    places = [x for x, content in zip(columns, backward, strict=True) if content]
    for x, following in pairwise(places):
        yield arrow(following, bottom + 22, x + 112, bottom + 22)
    yield arrow(72, bottom, 72, top + 44)


def cast_flow() -> str:
    """Return the figure of the casts of O1 and of O2 through a layer and its update."""
    loss = (FULL, "loss", "float32")
    scaled = (FULL, "loss × scale", "float16 only")
    one = lane(
        56,
        "O1: parameters stay float32, ops cast their inputs",
        [
            (FULL, "parameter", "float32"),
            (HALF, "cast", "cached copy"),
            (HALF, "Linear", "16 bits"),
            (FULL, "LayerNorm", "float32"),
            loss,
        ],
        [
            (FULL, "update", "unscaled, float32"),
            (FULL, "gradient", "float32"),
            (HALF, "backward", "16 bits"),
            (FULL, "backward", "float32"),
            scaled,
        ],
    )
    two = lane(
        300,
        "O2: parameters are 16-bit, the optimizer keeps master weights",
        [
            (HALF, "parameter", "16 bits"),
            None,
            (HALF, "Linear", "16 bits"),
            (HALF, "LayerNorm", "float32 inside"),
            loss,
        ],
        [
            (FULL, "update", "float32 master"),
            (HALF, "gradient", "16 bits"),
            (HALF, "backward", "16 bits"),
            (HALF, "backward", "16 bits"),
            scaled,
        ],
    )
    legend = [
        box(500, 8, 12, 12, HALF, radius=2),
        text(518, 19, "16 bits", size=12),
        box(600, 8, 12, 12, FULL, radius=2),
        text(618, 19, "float32", size=12),
    ]
    return figure(
        480, "The casts of O1 and O2 through a layer and its update", HEAD, *legend, *one, *two
    )


def shares(counts: dict[int, int], shift: int) -> tuple[float, float]:
    """Return the shares of gradients that are zero in float16, and that are subnormal."""
    total = sum(counts.values())
    lost = sum(count for exponent, count in counts.items() if exponent + shift < -25)
    few = sum(count for exponent, count in counts.items() if -25 <= exponent + shift < -14)
    return lost / total, few / total


def histogram(counts: dict[int, int], shift: int, top: int, title: str) -> Iterator[str]:
    """Yield a histogram of exponents over the range of float16."""
    left, right, height = 30, 690, 120
    low, high = -48, 18
    width, bottom = (right - left) / (high - low), top + height

    def place(exponent: float) -> float:
        return left + (exponent - low) * width

    yield box(place(-24), top, place(-14) - place(-24), height, FULL, opacity=0.12)
    yield box(place(-14), top, place(16) - place(-14), height, FULL, opacity=0.25)
    largest = max(counts.values())
    for exponent, count in counts.items():
        if exponent + shift >= low:
            tall = max(count / largest * (height - 34), 0.4)
            color = LOST if exponent + shift < -25 else HALF if exponent + shift < -14 else BITS
            x = place(exponent + shift)
            yield box(
                round(x, 2), round(bottom - tall, 2), round(width - 1, 2), round(tall, 2), color
            )
    lost, few = shares(counts, shift)
    yield text(left, top - 8, title, weight="bold")
    summary = f"{lost:.2%} become zero, {few:.1%} are subnormal"
    yield text(right, top - 8, summary, anchor="end")
    yield text(place(-19), top + 16, "subnormal", anchor="middle", size=11.5)
    yield text(place(1), top + 16, "normal numbers of float16", anchor="middle", size=11.5)
    yield f'<path d="M{left} {bottom}H{right}" stroke="{TEXT}"/>'
    for exponent in range(low, high + 1, 8):
        label = f'2<tspan dy="-5" font-size="10">{exponent}</tspan>'
        yield text(place(exponent), bottom + 17, label, anchor="middle", size=12)


def loss_scaling(record: dict[str, Any]) -> str:
    """Return the figure of gradients with and without a loss scale."""
    counts = {int(exponent): count for exponent, count in record["counts"].items()}
    return figure(
        372,
        "Gradients by size in a training run, with and without a loss scale of 65536",
        *histogram(counts, 0, 34, "Gradients of the loss"),
        *histogram(counts, 16, 214, "Gradients of the loss × 65536"),
    )


def figures() -> dict[str, str]:
    """Return all figures by the names of their files."""
    return {
        "formats.svg": formats(),
        "cast-flow.svg": cast_flow(),
        "loss-scaling.svg": loss_scaling(json.loads(RECORD.read_text())),
    }


def main() -> None:
    """Write the figures."""
    for name, drawing in figures().items():
        (IMAGES / name).write_text(drawing)
        print(f"wrote {IMAGES / name}")


if __name__ == "__main__":
    main()
