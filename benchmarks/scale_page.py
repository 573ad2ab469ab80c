"""Write the tables of docs/scale.md: `python benchmarks/scale_page.py`. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import mezzo

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
RANKS = (8, 64, 512)
CARDS = {80: 79, 141: 139}
"""Memory of a card as it is sold in GB → what can be allocated in GiB, of H100 and H200."""
MEMORY: Mapping[str, Mapping[str, Any]] = {
    "O0": {"policy": "O0"},
    "O1": {"policy": "O1"},
    "O2": {"policy": "O2"},
    "O2, `split` or `kahan`": {"policy": "O2", "master": "split"},
    "O2, `stochastic`": {"policy": "O2", "master": "stochastic"},
}
"""Options by row of the tables of memory."""
WIRE: Mapping[str, Mapping[str, Any]] = {
    "O0, O1": {"policy": "O0"},
    "O2, reduced in float32": {"policy": "O2", "reduce_dtype": "float32"},
    "O2, reduced in 16 bits": {"policy": "O2", "reduce_dtype": "bfloat16"},
}
"""Options by row of the tables of bytes sent."""


class Shape(NamedTuple):
    """Sizes of a Llama."""

    hidden: int
    layers: int
    wide: int
    keys: int
    """Width of the keys and of the values."""
    is_tied: bool = False
    """Whether the embedding is the head."""


LLAMAS = {
    "1B": Shape(2048, 16, 8192, 512, is_tied=True),
    "8B": Shape(4096, 32, 14336, 1024),
    "70B": Shape(8192, 80, 28672, 1024),
}
"""Llama 3.2 1B, Llama 3.1 8B and 70B."""
VOCABULARY = 128_256


def llama(shape: Shape) -> nn.Module:
    """Return the parameters of a Llama on the meta device, which allocates nothing."""
    with torch.device("meta"):
        layers = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, shape.hidden),
                "layers": layers,
                "norm": nn.RMSNorm(shape.hidden),
                "head": nn.Linear(shape.hidden, VOCABULARY, bias=False),
            }
        )
    if shape.is_tied:
        model["head"].weight = model["embedding"].weight
    return model


def _block(shape: Shape) -> nn.Module:
    hidden, widths = shape.hidden, (shape.hidden, shape.keys, shape.keys)
    linears = {
        **{f"in{i}": nn.Linear(hidden, width, bias=False) for i, width in enumerate(widths)},
        "out": nn.Linear(hidden, hidden, bias=False),
        "gate": nn.Linear(hidden, shape.wide, bias=False),
        "up": nn.Linear(hidden, shape.wide, bias=False),
        "down": nn.Linear(shape.wide, hidden, bias=False),
    }
    norms = {"norm1": nn.RMSNorm(hidden), "norm2": nn.RMSNorm(hidden)}
    return nn.ModuleDict({**linears, **norms})


def section(name: str) -> str:
    """Return the section of a model: a table of memory, and one of bytes sent."""
    model = llama(LLAMAS[name])
    numel = sum(parameter.numel() for parameter in model.parameters())
    parts = [
        f"### {name}: {numel:,} parameters",
        "Memory of a rank in GiB:",
        _table(model, MEMORY, lambda one: _marked(one.memory)),
        "GiB that a rank sends in a step:",
        _table(model, WIRE, lambda one: f"{one.wire / 2**30:.1f}"),
    ]
    return "\n\n".join(parts)


def _table(
    model: nn.Module,
    rows: Mapping[str, Mapping[str, Any]],
    show: Callable[[mezzo.Estimate], str],
) -> str:
    columns = [("ddp", 8), *(("fsdp", ranks) for ranks in RANKS)]
    heads = [f"{strategy}, {ranks}" for strategy, ranks in columns]
    lines = [f"| | {' | '.join(heads)} |", f"|---{'|---:' * len(columns)}|"]
    for label, options in rows.items():
        cells = [
            show(mezzo.estimate(model, ranks=ranks, strategy=strategy, **options))
            for strategy, ranks in columns
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _marked(size: int) -> str:
    """Return a size in GiB: in italics if only the larger card has it, struck out if none has."""
    fits = [sold for sold, free in CARDS.items() if size <= free * 2**30]
    marks = {0: "~~", 1: "*", 2: ""}
    return f"{marks[len(fits)]}{size / 2**30:.1f}{marks[len(fits)]}"


def main() -> None:
    """Write the sections between their markers."""
    sections = "\n\n".join(map(section, LLAMAS))
    marked = re.compile(r"(<!-- tables -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda found: found[1] + sections + found[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
