"""Overflow, underflow and headroom of each layer: totals for tables, heat maps over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mezzo.observing.log_values import (
    Line,
    LoggedCounts,
    finite,
    gradient_counts,
    step_of,
    tensor_stats,
)
from mezzo.reporting.run_data import RunData

_COLUMNS = 80
"""Columns of a heat map; a column is the worst, or the mean, of its steps."""
_LAYERS = 80
"""Rows of a heat map: of larger models those that are worst."""

_SMALL_SHARE = 0.001
_MANY_BITS = 16


@dataclass(frozen=True)
class LayerRow:
    """What is known of one parameter or module, over the whole run."""

    name: str
    overflowed: int = 0
    """Gradient values that were NaN or infinite."""
    underflow: float | None = None
    """Share of gradient values, zeros left out, below the smallest normal number of their dtype."""
    zeros: float | None = None
    """Share of gradient values that were zero."""
    headroom: float | None = None
    """Fewest bits before an overflow, of gradients, activations and parameters."""
    lost: float | None = None
    """Largest share of a sampled update that rounding lost."""
    dtype: str | None = None


@dataclass(frozen=True)
class HeatMap:
    """Values by layer and time."""

    name: str
    unit: str
    """`"share"` (0 to 1, more is worse) or `"bits"` (fewer are worse)."""
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    """The first step of each column."""
    values: tuple[tuple[float | None, ...], ...]
    """One row a layer; None where nothing was sampled."""
    left_out: int = 0
    """Layers that are not shown."""

    @property
    def is_dull(self) -> bool:
        """Whether nothing underflows, or overflow is far away, everywhere."""
        values = [value for row in self.values for value in row if value is not None]
        return max(values) < _SMALL_SHARE if self.unit == "share" else min(values) > _MANY_BITS


def layer_rows(run: RunData) -> list[LayerRow]:
    """Return a row for each layer in the log, in the order of the model."""
    counts: dict[str, LoggedCounts] = {}
    for line in run.of("gradients"):
        for name, layer_counts in gradient_counts(line):
            counts[name] = counts.get(name, LoggedCounts()).plus(layer_counts)
    headroom: dict[str, float] = {}
    lost: dict[str, float] = {}
    dtypes: dict[str, str] = {}
    for line in run.of("tensors"):
        for name, stats in tensor_stats(line):
            dtypes.setdefault(name, str(stats.get("dtype") or ""))
            _keep(headroom, name, finite(stats.get("headroom")), min)
            _keep(lost, name, finite(stats.get("lost")), max)
    names = dict.fromkeys([*counts, *dtypes])
    return [
        LayerRow(
            name=name,
            overflowed=int(counts[name].overflowed) if name in counts else 0,
            underflow=counts[name].underflow if name in counts else None,
            zeros=counts[name].zero_share if name in counts else None,
            headroom=headroom.get(name),
            lost=lost.get(name),
            dtype=dtypes.get(name),
        )
        for name in names
    ]


def heat_maps(run: RunData) -> list[HeatMap]:
    """Return the heat maps that the log has data for."""
    gradients = run.of("gradients")
    sampled = run.of("tensors")
    counted = list(_counted(gradients))
    candidates = [
        _mean_map("Gradients that underflow", counted, lambda counts: counts.underflow),
        _mean_map("Gradients that are zero", counted, lambda counts: counts.zero_share),
        *(
            _sampled_map(f"Headroom of {which}", "bits", sampled, which, "headroom", min)
            for which in ("activations", "gradients", "parameters")
        ),
        _sampled_map(
            "Activations that underflow", "share", sampled, "activations", "underflow", max
        ),
        _sampled_map("Updates lost to rounding", "share", sampled, "updates", "lost", max),
    ]
    found = [candidate for candidate in candidates if candidate is not None]
    # Those that show something come first; the order is otherwise the one above.
    return sorted(found, key=lambda heat_map: heat_map.is_dull)


def _keep(
    found: dict[str, float], name: str, value: float | None, choose: Callable[..., float]
) -> None:
    if value is not None:
        found[name] = choose(found.get(name, value), value)


def _counted(lines: Iterable[Line]) -> Iterator[tuple[int, str, LoggedCounts]]:
    for line in lines:
        step = step_of(line)
        if step is not None:
            yield from ((step, name, counts) for name, counts in gradient_counts(line))


def _mean_map(
    name: str,
    counted: list[tuple[int, str, LoggedCounts]],
    share: Callable[[LoggedCounts], float | None],
) -> HeatMap | None:
    columns = _columns(step for step, *_ in counted)
    cells: dict[str, dict[int, LoggedCounts]] = {}
    for step, layer, counts in counted:
        row = cells.setdefault(layer, {})
        column = bisect_right(columns, step) - 1
        row[column] = LoggedCounts(
            *map(sum, zip(row.get(column, LoggedCounts()), counts, strict=True))
        )
    shares = {
        layer: {column: share(counts) for column, counts in row.items()}
        for layer, row in cells.items()
    }
    return _heat_map(name, "share", shares, columns)


def _sampled_map(
    name: str, unit: str, lines: list[Line], which: str, field: str, worst: Callable[..., float]
) -> HeatMap | None:
    chosen = [
        (step, line)
        for line in lines
        if line.get("which") == which and (step := step_of(line)) is not None
    ]
    columns = _columns(step for step, _ in chosen)
    cells: dict[str, dict[int, float | None]] = {}
    for step, line in chosen:
        column = bisect_right(columns, step) - 1
        for layer, stats in tensor_stats(line):
            value = finite(stats.get(field))
            if value is not None:
                row = cells.setdefault(layer, {})
                before = row.get(column)
                row[column] = value if before is None else worst(before, value)
    return _heat_map(name, unit, cells, columns)


def _columns(steps: Iterable[int]) -> tuple[int, ...]:
    """Return the first steps of at most `_COLUMNS` columns."""
    ordered = sorted(set(steps))
    stride = -(-len(ordered) // _COLUMNS) or 1
    return tuple(ordered[::stride])


def _heat_map(
    name: str, unit: str, cells: dict[str, dict[int, float | None]], columns: tuple[int, ...]
) -> HeatMap | None:
    if not any(value is not None for row in cells.values() for value in row.values()):
        return None
    sign = 1 if unit == "share" else -1

    def badness(layer: str) -> float:
        values = [sign * value for value in cells[layer].values() if value is not None]
        return max(values, default=float("-inf"))

    worst = set(sorted(cells, key=badness, reverse=True)[:_LAYERS])
    layers = tuple(layer for layer in cells if layer in worst)
    values = tuple(
        tuple(cells[layer].get(column) for column in range(len(columns))) for layer in layers
    )
    return HeatMap(name, unit, layers, columns, values, len(cells) - len(layers))
