"""The charts of a comparison as figures of plotly: bars of time, bytes and casts, and curves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.verdict import INFERENCE
from mezzo.prepare.plan_rows import format_bytes
from mezzo.reporting.charts import Figure, rounded

COLORS = {
    "float32": "#7a7f8a",
    "TF32": "#9a8c3c",
    "torch.amp": "#e8833a",
    "Apex O1": "#d1495b",
    "Apex O2": "#a66bd4",
    "O1": "#0fa3b1",
    "O2": "#3b82f6",
    "O2 captured": "#2aa775",
    INFERENCE: "#c27ba0",
}
"""Colors of the modes, readable on light and dark backgrounds."""
_BAR = 30
"""Pixels of a bar with the gap below it."""
_CURVE_HEIGHT = 300


def color_of(mode: str) -> str:
    """Return the color of a mode; `static O1` has that of O1.

    >>> color_of("static O1") == COLORS["O1"], color_of("mine")
    (True, '#7a7f8a')
    """
    return COLORS.get(mode) or COLORS.get(mode.rpartition(" ")[2], COLORS["float32"])


def comparison_charts(comparison: Comparison) -> dict[str, Figure]:
    """Return the charts that a comparison has values for, by their titles."""
    made = {
        "Time of a step": _time_bars(comparison),
        "Memory": _byte_bars(comparison, "peak_bytes"),
        "Kept for backward": _byte_bars(comparison, "saved_bytes"),
        "Casts of a step": _cast_bars(comparison),
        "Loss": _curves(comparison, "loss_curve"),
        "Accuracy": _curves(comparison, "accuracy_curve"),
    }
    return {title: figure for title, figure in made.items() if figure is not None}


def _time_bars(comparison: Comparison) -> Figure | None:
    # The time of a converted model is that of a forward pass.
    modes = [
        mode for mode in comparison.modes if rounded(mode.milliseconds) and mode.mode != INFERENCE
    ]
    ratios = [comparison.speedup(mode.mode) for mode in modes]
    texts = [
        f"{mode.milliseconds:.3g} ms{f' · {ratio:.2f} ×' if ratio else ''}"
        for mode, ratio in zip(modes, ratios, strict=True)
    ]
    return _bars(modes, [rounded(mode.milliseconds) for mode in modes], texts, "ms")


def _byte_bars(comparison: Comparison, field: str) -> Figure | None:
    modes = [mode for mode in comparison.modes if getattr(mode, field)]
    sizes = [getattr(mode, field) for mode in modes]
    values = [rounded(size / 2**20) for size in sizes]
    return _bars(modes, values, list(map(format_bytes, sizes)), "MiB")


def _cast_bars(comparison: Comparison) -> Figure | None:
    modes = [mode for mode in comparison.modes if mode.casts is not None]
    if not any(mode.casts for mode in modes):
        return None
    return _bars(
        modes, [mode.casts for mode in modes], [f"{mode.casts:,}" for mode in modes], "casts"
    )


def _bars(
    modes: Sequence[ModeResult], values: Sequence[float | None], texts: Sequence[str], unit: str
) -> Figure | None:
    if not modes:
        return None
    trace = {
        "type": "bar",
        "orientation": "h",
        # Names are escaped because plotly interprets some tags in labels.
        "y": [escape(mode.mode) for mode in modes],
        "x": list(values),
        "text": list(texts),
        "textposition": "auto",
        "marker": {"color": [color_of(mode.mode) for mode in modes]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False, "ticksuffix": " "},
        "bargap": 0.25,
        "showlegend": False,
    }
    return {"data": [trace], "layout": layout, "height": 80 + _BAR * len(modes)}


def _curves(comparison: Comparison, field: str) -> Figure | None:
    """Return a line for each mode over epochs, or over the steps."""
    modes = [mode for mode in comparison.modes if len(getattr(mode, field)) > 1]
    if not modes:
        return None
    by_epoch = any(mode.accuracy_curve for mode in comparison.modes)
    share = field == "accuracy_curve"
    traces = [
        _curve(mode, getattr(mode, field), comparison.steps, by_epoch=by_epoch, share=share)
        for mode in modes
    ]
    layout = {
        "xaxis": {"title": {"text": "epoch" if by_epoch else "step"}},
        "yaxis": {"tickformat": ".0%"} if share else {"rangemode": "tozero"},
        "hovermode": "x unified",
        # Below, because the buttons of a chart are above it.
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
    }
    return {"data": traces, "layout": layout, "height": _CURVE_HEIGHT + 12 * len(modes)}


def _curve(
    mode: ModeResult,
    values: Sequence[float],
    steps: int,
    *,
    by_epoch: bool,
    share: bool,
) -> dict[str, Any]:
    count = len(values)
    numbers = range(1, count + 1)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(mode.mode),
        "x": list(numbers) if by_epoch else [round(steps * number / count) for number in numbers],
        "y": [rounded(value) for value in values],
        "line": {"color": color_of(mode.mode), "width": 1.8},
        "marker": {"size": 5},
        "hovertemplate": f"{escape(mode.mode)}: %{{y:{'.1%' if share else '.4g'}}}<extra></extra>",
    }
