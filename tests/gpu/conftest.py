"""Fixtures and reports of the tests on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from mezzo.step import replay_timing


@pytest.fixture(autouse=True)
def _replays_count_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use every captured graph: tests that share a GPU cannot be timed."""
    monkeypatch.setattr(replay_timing, "MARGIN", 1e9)


@pytest.fixture
def no_host_reads() -> Iterator[None]:
    """Make every synchronization with the device raise."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of the differential harness: a line for each test that ran."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
    ]
    found = [(dict(report.user_properties), report.outcome) for report in reports]
    rows = sorted(
        (*properties["differential"], properties.get("difference", outcome))
        for properties, outcome in found
        if "differential" in properties
    )
    if not rows:
        return
    terminalreporter.section("captured against eager")
    for name, variant, how, skips, difference in rows:
        terminalreporter.write_line(
            f"{name:<28} {variant:<44} {skips:>2} skipped  {difference:<10} {how[:110]}"
        )
    exact, captured = (
        sum(row[place] == text for row in rows)
        for place, text in ((4, "bit-equal"), (2, "captured"))
    )
    terminalreporter.write_line(f"{len(rows)} rows, {captured} captured, {exact} bit-equal")
