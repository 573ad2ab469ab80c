"""`mezzo.write_report`: one HTML page about a run, which opens without a network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from mezzo._files import atomic_writer
from mezzo.observing.log_values import finite
from mezzo.reporting import charts, tables
from mezzo.reporting.figures import KeyFigure, key_figures
from mezzo.reporting.policy_diff import policy_changes
from mezzo.reporting.rendering import asset, render_page
from mezzo.reporting.run_data import RunData, Source, read_run
from mezzo.reporting.verdict import judge


class Findings(Protocol):
    """What `mezzo.lint` returns."""

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the findings as plain data."""


class Finding(Protocol):
    """What `mezzo.trace_overflow` returns."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""


def write_report(
    log: Source,
    path: str | os.PathLike[str],
    *,
    lint: Findings | None = None,
    findings: Finding | Iterable[Finding] = (),
) -> Path:
    """Write one self-contained HTML page about a run, and return its path.

    The page has the verdict in a sentence, the loss scale with the skipped steps and their causes,
    the loss, headroom and underflow by layer and time, ops by dtype, casts, lint findings and the
    policy that a finding suggests. It needs no network. The file is complete, or it is not there.

    Args:
        log: The log that `mezzo.observe(..., log=...)` or `mezzo run --log` wrote, also while it is
            being written; what `mezzo.observe` returned; or a list with one of them for each rank.
        path: The file to write.
        lint: The result of `mezzo.lint`, if it is not in the log.
        findings: One or several results of `mezzo.trace_overflow`; their cures become the suggested
            policy.

    Raises:
        UnsupportedError: plotly is not installed.
        MezzoError: The log is not there, or is no log.

    >>> import mezzo, tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> model = torch.nn.Linear(2, 1)
    >>> with mezzo.observe(model, log=folder / "run.jsonl"):
    ...     output = model(torch.ones(1, 2))
    >>> mezzo.write_report(folder / "run.jsonl", folder / "report.html").name
    'report.html'
    """
    run = read_run(log)
    listed = findings if isinstance(findings, Iterable) else [findings]
    extra = [{"kind": "finding", **finding.to_dict()} for finding in listed]
    if lint is not None:
        extra.append({"kind": "lint", "findings": lint.to_dicts()})
    page = render(run.with_records(extra))
    target = Path(path)
    with atomic_writer(target) as file:
        file.write(page.encode())
    return target


def render(run: RunData) -> str:
    """Return the page about a run."""
    timeline, layer_maps = charts.timeline(run), charts.layer_maps(run)
    return render_page(
        asset("mezzo.reporting", "page.html"),
        "write_report",
        {"figures": {"chart-timeline": timeline} if timeline else {}, "maps": layer_maps},
        title=run.header.get("model") or "run",
        kind="mezzo report",
        verdict=judge(run),
        figures=key_figures(run),
        sections=_sections(run),
        changes=policy_changes(run),
        timeline=timeline,
        layer_maps=layer_maps,
        about=_about(run),
    )


@dataclass(frozen=True)
class Section:
    """A table of the page."""

    key: str
    title: str
    table: tables.Table
    note: str
    """What the table shows; or, if it is empty, how to get it into the log."""


def _sections(run: RunData) -> list[Section]:
    made = [
        Section("skips", "Skipped steps", tables.skip_table(run), "One row for each skipped step."),
        Section(
            "layers",
            "Layers",
            tables.layer_table(run),
            "Gradients over the whole run; headroom is the least that was sampled.",
        ),
        Section(
            "ops", "Ops by dtype", tables.op_table(run), "Calls of each op in one step, by dtype."
        ),
        Section("casts", "Casts", tables.cast_table(run), "Where tensors change their dtype."),
        Section("lint", "Lint", tables.lint_table(run), "Findings of mezzo.lint."),
        Section("events", "Events", tables.event_table(run), "What mezzo decided while it ran."),
    ]
    return [section for section in made if section.table.rows]


def _about(run: RunData) -> list[KeyFigure]:
    started = finite(run.header.get("started"))
    values = {
        name: run.header.get(name)
        for name in ("model", "policy", "dtype", "device", "torch", "mezzo")
    } | {"dtype": run.dtype, "policy": run.policy}
    if started:
        values["started"] = datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if run.world_size > 1:
        values["ranks"] = ", ".join(str(log.rank) for log in run.ranks)
    return [KeyFigure(name, str(value)) for name, value in values.items() if value]
