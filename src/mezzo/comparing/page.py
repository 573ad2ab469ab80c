"""Write comparisons as one HTML page, which opens without a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo._errors import MezzoError
from mezzo._files import atomic_writer
from mezzo.comparing.charts import comparison_charts
from mezzo.comparing.comparison import Comparison
from mezzo.comparing.stored import others, stored_results
from mezzo.comparing.table import documented_table, machine_table, mode_table, summary_table
from mezzo.comparing.verdict import judge
from mezzo.reporting.charts import Figure
from mezzo.reporting.figures import KeyFigure
from mezzo.reporting.page import Section
from mezzo.reporting.rendering import asset, render_page
from mezzo.reporting.verdict import Verdict

_CHART_NOTES = {
    "Time of a step": "Median, and how many times as fast as float32 that is.",
    "Memory": (
        "On a GPU the peak of allocated memory, on a CPU parameters, gradients and optimizer"
        " states."
    ),
    "Kept for backward": "Bytes of the tensors that a forward pass keeps for backward.",
    "Casts of a step": "Changes of dtype: each reads and writes a tensor.",
    "Loss": "Mean of each epoch, or of each tenth of the steps.",
    "Accuracy": "On data that were not trained on.",
}


def write_comparison(
    comparisons: Sequence[Comparison],
    path: str | os.PathLike[str],
    *,
    stored: Sequence[Comparison] | None = None,
) -> Path:
    """Write one self-contained HTML page about comparisons, and return its path.

    For each workload it has the verdict in a sentence, charts of time, memory, loss and accuracy, a
    table of all modes, the numbers of documents and those of other machines beside them. The file
    is complete, or it is not there.

    Args:
        comparisons: Results of `mezzo compare`, one for each workload.
        path: The file to write.
        stored: Results of other machines; by default those that come with mezzo.

    Raises:
        UnsupportedError: plotly or jinja2 is not installed.
        MezzoError: There is no comparison, or a stored file has something else.
    """
    if not comparisons:
        raise MezzoError("There is no comparison to write. Pass at least one result of compare().")
    page = render(comparisons, tuple(stored_results() if stored is None else stored))
    target = Path(path)
    with atomic_writer(target) as file:
        file.write(page.encode())
    return target


def render(comparisons: Sequence[Comparison], stored: tuple[Comparison, ...]) -> str:
    """Return the page about comparisons."""
    parts = [_part(number, comparison, stored) for number, comparison in enumerate(comparisons, 1)]
    names = ", ".join(dict.fromkeys(comparison.workload for comparison in comparisons))
    return render_page(
        asset("mezzo.comparing", "page.html"),
        "write_comparison",
        {"figures": {key: figure for part in parts for key, figure in part.figure_data.items()}},
        title=f"{names} on {comparisons[0].machine}",
        kind="mezzo compare",
        notes=_CHART_NOTES,
        parts=parts,
        machines=summary_table(stored),
    )


@dataclass(frozen=True)
class _Part:
    """What the page shows of one workload."""

    key: str
    workload: str
    name: str
    verdict: Verdict
    figures: list[KeyFigure]
    charts: dict[str, str]
    """Ids of the charts by their titles."""
    figure_data: dict[str, Figure]
    """Figures of plotly by the ids of the charts."""
    sections: list[Section]


def _part(number: int, comparison: Comparison, stored: tuple[Comparison, ...]) -> _Part:
    # Numbers, and not names, which may have characters that an id cannot.
    key = f"workload-{number}"
    figures = comparison_charts(comparison)
    ids = {title: f"{key}-chart-{place}" for place, title in enumerate(figures)}
    return _Part(
        key,
        comparison.workload,
        f"{comparison.workload}: {comparison.title}",
        judge(comparison),
        _key_figures(comparison),
        ids,
        {ids[title]: figure for title, figure in figures.items()},
        _sections(key, comparison, stored),
    )


def _key_figures(comparison: Comparison) -> list[KeyFigure]:
    values: dict[str, Any] = {
        "machine": comparison.machine,
        "size": comparison.preset,
        "data": comparison.data,
        "steps": f"{comparison.steps:,}",
        "rounds of timing": comparison.rounds,
        "torch": comparison.torch.partition("+")[0],
        "mezzo": comparison.mezzo,
    }
    return [KeyFigure(name, str(value)) for name, value in values.items()]


def _sections(key: str, comparison: Comparison, stored: tuple[Comparison, ...]) -> list[Section]:
    on_machines = [comparison, *others(comparison, stored)]
    made = [
        Section(
            f"{key}-modes",
            "All modes",
            mode_table(comparison),
            "Medians of interleaved rounds. The loss is the mean over the last tenth of the steps;"
            " after it the difference from float32's.",
        ),
        Section(
            f"{key}-documents",
            "What documents report",
            documented_table(on_machines),
            "Times as fast as float32: the document's machine, then what was measured.",
        ),
    ]
    if len(on_machines) > 1:
        made.append(
            Section(
                f"{key}-machines",
                "On other machines",
                machine_table(on_machines),
                "Milliseconds of a step, and how many times as fast as float32 that is.",
            )
        )
    return [section for section in made if section.table.rows]
