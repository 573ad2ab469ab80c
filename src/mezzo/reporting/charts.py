"""The charts of a report as figures of plotly, in plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from mezzo.observing.log_values import finite, number, step_of
from mezzo.observing.skip_causes import Skip
from mezzo.reporting.layers import HeatMap, heat_maps
from mezzo.reporting.run_data import RankLog, RunData

Figure = dict[str, Any]
"""A figure of plotly: `data`, `layout`, and what the page's script needs besides."""

_POINTS = 8000
"""Points of all ranks in a line; longer ones keep the least and greatest of each interval."""
_RANKS = 16
"""Ranks whose lines are drawn."""
_SMOOTH = 60
"""A smoothed loss is the mean over this part of the run."""
_COLORS = ("#3b82f6", "#e8833a", "#2aa775", "#a66bd4", "#d1495b", "#0fa3b1", "#9a8c3c", "#7a7f8a")
"""Colors of the ranks, readable on light and dark backgrounds."""
_SKIP, _ODD_SKIP = "#e0a100", "#e5484d"
_ROW_HEIGHT = 17

_SHARE_COLORS = [
    [0.0, "rgba(127,140,160,0.10)"],
    [0.02, "rgba(240,190,90,0.45)"],
    [0.25, "rgba(236,140,60,0.85)"],
    [1.0, "rgba(190,30,45,1)"],
]
_BITS_COLORS = [
    [0.0, "rgba(190,30,45,1)"],
    [0.12, "rgba(236,140,60,0.95)"],
    [0.35, "rgba(240,200,110,0.60)"],
    [0.60, "rgba(60,160,130,0.45)"],
    [1.0, "rgba(60,130,160,0.22)"],
]
_MANY_BITS = 16
_TICKS = 7


def timeline(run: RunData) -> Figure | None:
    """Return loss scale, loss and gradient norm over the steps, with the skipped steps."""
    rows = [
        ("loss scale", "scale", _scale_traces),
        ("loss", "loss", _loss_traces),
        ("gradient norm", "norm", _norm_traces),
    ]
    shown = [
        (title, traces)
        for title, field, make in rows
        if _has_values(run, field) and (traces := make(run))
    ]
    if not shown:
        return None
    layout: dict[str, Any] = {
        "xaxis": {
            "title": {"text": "step"},
            "rangemode": "nonnegative",
            "anchor": f"y{len(shown)}".replace("y1", "y"),
        },
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0},
    }
    data = []
    gap, height = 0.07, 1 / len(shown)
    for index, (title, traces) in enumerate(shown):
        axis = "y" if index == 0 else f"y{index + 1}"
        top = 1 - index * height
        layout[axis.replace("y", "yaxis")] = {
            "domain": [max(top - height + (gap if index < len(shown) - 1 else 0), 0), top],
            "title": {"text": title},
            **(_powers_of_two(run) if title == "loss scale" else {}),
        }
        data += [{**trace, "yaxis": axis} for trace in traces]
    return {"data": data, "layout": layout, "height": 130 + 190 * len(shown)}


def layer_maps(run: RunData) -> list[Figure]:
    """Return the heat maps of layers over time."""
    return [_heat_map_figure(heat_map) for heat_map in heat_maps(run)]


def _has_values(run: RunData, field: str) -> bool:
    if field == "scale":
        # Without a scaler the scale is 1 throughout.
        return any(finite(line.get(field)) not in {None, 1.0} for line in run.of("step"))
    return any(number(line.get(field)) is not None for line in run.of("step"))


def _powers_of_two(run: RunData) -> dict[str, Any]:
    """Return a logarithmic axis whose ticks are powers of two."""
    scales = [value for line in run.of("step") if (value := finite(line.get("scale")))]
    # Without any, such as in a log that was changed, the axis begins at 1.
    exponents = [math.floor(math.log2(value)) for value in scales if value > 0] or [0]
    stride = -(-(max(exponents) - min(exponents) + 1) // _TICKS)
    ticks = range(min(exponents), max(exponents) + 2, stride)
    return {
        "type": "log",
        "tickvals": [2.0**tick for tick in ticks],
        "ticktext": [f"2<sup>{tick}</sup>" for tick in ticks],
    }


def _scale_traces(run: RunData) -> list[dict[str, Any]]:
    traces = _lines(run, "scale", 0, shape="hv")
    normal = [skip for skip in run.skips if skip.is_normal]
    odd = [skip for skip in run.skips if not skip.is_normal]
    return [
        *traces,
        *_skip_markers("skipped: scale search", normal, _SKIP, "x"),
        *_skip_markers("skipped: look at it", odd, _ODD_SKIP, "x"),
    ]


def _skip_markers(
    name: str, skips: Sequence[Skip], color: str, symbol: str
) -> list[dict[str, Any]]:
    if not skips:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [skip.step for skip in skips],
            "y": [skip.scale or skip.next_scale for skip in skips],
            "text": [escape(_skip_text(skip)) for skip in skips],
            "hovertemplate": "skipped: %{text}<extra></extra>",
            "marker": {"color": color, "size": 8, "symbol": symbol, "line": {"color": color}},
        }
    ]


def _skip_text(skip: Skip) -> str:
    first = f" (first in {skip.parameter})" if skip.parameter else ""
    return f"{skip.cause}{first}"


def _loss_traces(run: RunData) -> list[dict[str, Any]]:
    traces = []
    for raw in _lines(run, "loss", 2):
        width = len(raw["x"]) // _SMOOTH
        if width > 1:
            mean = raw["hovertemplate"].replace(":", ", smoothed:", 1)
            traces.append({**raw, "opacity": 0.35})
            smoothed = {"y": _smoothed(raw["y"], width), "showlegend": False, "hovertemplate": mean}
            traces.append({**raw, **smoothed})
        else:
            traces.append(raw)
    return traces


def _norm_traces(run: RunData) -> list[dict[str, Any]]:
    return _lines(run, "norm", 3)


def _lines(run: RunData, field: str, color: int, shape: str = "linear") -> list[dict[str, Any]]:
    """Return a line for each rank, in its color; one rank has a color for each field."""
    ranks = run.ranks[:_RANKS]
    by_rank = run.world_size > 1
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"rank {log.rank}" if by_rank else field,
            "legendgroup": f"rank {log.rank}",
            "showlegend": by_rank and field == "loss",
            **_points(log, field, _POINTS // len(ranks)),
            "line": {"color": _COLORS[(index if by_rank else color) % len(_COLORS)], "width": 1.6}
            | {"shape": shape},
            "hovertemplate": (
                f"{field}{f', rank {log.rank}' if by_rank else ''}: %{{y:.6g}}<extra></extra>"
            ),
        }
        for index, log in enumerate(ranks)
    ]


def _points(log: RankLog, field: str, limit: int) -> dict[str, Any]:
    points = [
        (step, rounded(line.get(field)))
        for line in log.of("step")
        if (step := step_of(line)) is not None
    ]
    kept = thinned(points, limit)
    return {"x": [step for step, _ in kept], "y": [value for _, value in kept]}


def rounded(value: Any) -> float | None:
    """Return a number with six digits, as the page shows it; None if it is not finite."""
    found = finite(value)
    return None if found is None else float(f"{found:.6g}")


def thinned(
    points: list[tuple[int, float | None]], limit: int = _POINTS
) -> list[tuple[int, float | None]]:
    """Return at most `limit` points: of each interval the least and the greatest.

    >>> thinned([(1, 5.0), (2, 1.0), (3, 9.0), (4, 4.0)], limit=2)
    [(2, 1.0), (3, 9.0)]
    """
    if len(points) <= limit:
        return points
    width = -(-len(points) // max(limit // 2, 1))
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), width):
        finite_points = [point for point in points[start : start + width] if point[1] is not None]
        if finite_points:
            ends = {
                min(finite_points, key=lambda point: point[1] or 0.0),
                max(finite_points, key=lambda point: point[1] or 0.0),
            }
            kept += sorted(ends)
    return kept


def _smoothed(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return means over the values around each, at the ends over fewer."""
    totals, counts = [0.0], [0]
    for value in values:
        totals.append(totals[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    means = list[float | None]()
    for index in range(len(values)):
        first, last = max(index - width // 2, 0), min(index + width // 2 + 1, len(values))
        count = counts[last] - counts[first]
        means.append(rounded((totals[last] - totals[first]) / count) if count else None)
    return means


def _heat_map_figure(heat_map: HeatMap) -> Figure:
    # Names are escaped because plotly interprets some tags in labels.
    names = [escape(name) for name in heat_map.layers]
    share = heat_map.unit == "share"
    value = "%{z:.2%}" if share else "%{z:.1f} bits"
    trace = {
        "type": "heatmap",
        "x": list(heat_map.steps),
        "y": names,
        "z": [[None if v is None else float(f"{v:.3g}") for v in row] for row in heat_map.values],
        "zmin": 0,
        "zmax": 1 if share else _MANY_BITS,
        "colorscale": _SHARE_COLORS if share else _BITS_COLORS,
        "xgap": 1 if len(heat_map.steps) <= 50 else 0,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}<br>from step %{{x}}: {value}<extra></extra>",
        "colorbar": {
            "title": {"text": "share" if share else "bits", "side": "top"},
            "tickformat": ".0%" if share else "d",
            "thickness": 10,
            "len": 1,
        },
    }
    layout = {
        # As numbers, columns would span steps before the first, and layers have gaps from 0 to 5.
        "xaxis": {"title": {"text": "step"}, "showgrid": False, "type": "category", "nticks": 12},
        "yaxis": {
            "type": "category",
            "showgrid": False,
            "autorange": "reversed",
            "tickmode": "array",
            "tickvals": names,
        },
    }
    return {
        "name": heat_map.name,
        "unit": heat_map.unit,
        "left_out": heat_map.left_out,
        "data": [trace],
        "layout": layout,
        "labels": [name.removesuffix(".weight") for name in heat_map.layers],
        "height": 110 + _ROW_HEIGHT * max(len(names), 6),
    }
