"""Check docs/numerics.md: its numbers are those stored."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "numerics.md"


@pytest.fixture(scope="module")
def long_run():
    path = ROOT / "benchmarks" / "long_run_page.py"
    spec = importlib.util.spec_from_file_location("long_run_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_and_the_plot_are_made_from_the_stored_run(long_run) -> None:
    record = json.loads(long_run.RECORD.read_text())
    assert long_run.table(record["runs"]) in PAGE.read_text()
    plot = (ROOT / "docs" / "long-run.svg").read_text()
    assert long_run.plot(record) == plot
    lines = ET.fromstring(plot).findall("{*}polyline")
    assert len(lines) == 2 * len(record["runs"])
    heights = [
        float(point.partition(",")[2]) for one in lines for point in one.get("points").split()
    ]
    assert 40 <= min(heights) < max(heights) <= 390


def test_the_number_of_trainings_is_that_of_the_stored_results() -> None:
    rows = json.loads((ROOT / "benchmarks/results/numerics-nvidia-h200.json").read_text())["rows"]
    passed = sum(row["value"] <= row["bar"] for row in rows)
    text = " ".join(PAGE.read_text().split())
    assert f"trains {len(rows)} small models" in text
    assert f"{passed} of {len(rows)} pass; in {sum(bool(row['entries']) for row in rows)}" in text
