"""How far a converted program is from float32, as values that print as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 10


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor."""

    name: str
    """The output's place in what the model returns, or the node's name."""
    dtype: str
    """What the program computed it in."""
    relative: float
    """The norm of the difference over the norm of the reference; of integers and booleans, the share of elements that differ."""
    largest: float
    """The largest absolute difference."""
    nonfinite: int
    """Elements that are infinite or NaN here and finite in the reference. They count in no other number."""
    op: str = ""
    """The op; empty for an output."""
    module: str = ""
    """The path of the module that called it; empty for the model itself and for an output."""
    source: str = ""
    """The file and line that called it."""

    @property
    def where(self) -> str:
        """The module and the source line, as far as they are known."""
        return " ".join(word for word in (self.module, self.source) if word)

    @property
    def badness(self) -> tuple[bool, float]:
        """What the worst are sorted by: values that are lost, then the relative error."""
        return self.nonfinite > 0, self.relative


@dataclass(frozen=True)
class Comparison:
    """A program against its reference: every output, and every node that both have, worst first.

    >>> print(Comparison((TensorError("logits", "float32", 3.2e-4, 1e-2, 0),)))
    output  dtype    relative error  largest  non-finite
    logits  float32         3.2e-04  1.0e-02           0
    """

    outputs: tuple[TensorError, ...]
    """In the order in which the model returns them."""
    nodes: tuple[TensorError, ...] = ()
    """Worst first; empty where there was no graph to compare with."""

    @property
    def worst(self) -> float:
        """The largest relative error of an output; infinite where an output has lost values."""
        return max((float("inf") if one.nonfinite else one.relative for one in self.outputs), default=0.0)

    def __str__(self) -> str:
        lines = _table(["output", "dtype", "relative error", "largest", "non-finite"], self.outputs)
        if self.nodes:
            lines += ["", f"the worst {min(_SHOWN, len(self.nodes))} of {len(self.nodes)} nodes"]
            lines += _table(["node", "dtype", "relative error", "largest", "non-finite", "op", "where"], self.nodes[:_SHOWN])
        return "\n".join(lines)


def _table(heading: Sequence[str], errors: Sequence[TensorError]) -> list[str]:
    cells = [(one.name, one.dtype, f"{one.relative:.1e}", f"{one.largest:.1e}", str(one.nonfinite), one.op, one.where)[: len(heading)] for one in errors]
    widths = [max(len(row[column]) for row in (heading, *cells)) for column in range(len(heading))]
    # Numbers, columns two to four, stand on the right.
    return ["  ".join(f"{cell:{'>' if column in {2, 3, 4} else '<'}{widths[column]}}" for column, cell in enumerate(row)).rstrip() for row in (heading, *cells)]
