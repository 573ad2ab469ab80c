"""How the benchmarks measure: interleaved runs, compared by their medians.

Results are stored with the name of the machine.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import mezzo

RESULTS = Path(__file__).parent / "results"

Contestant = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One comparison: median times and the number that is compared."""

    name: str
    times: Mapping[str, float]
    """Contestant → median time of one call in microseconds."""
    value: float
    """The number that is compared, in `unit`."""
    unit: str
    bar: float
    """The value that must not be exceeded."""

    def __str__(self) -> str:
        times = "  ".join(f"{name} {median:.2f} µs" for name, median in self.times.items())
        return f"{self.name:46} {self.value:7.3f} {self.unit:4} (at most {self.bar:g})   {times}"


def take_turns(
    contestants: Mapping[str, Contestant], *, calls: int, rounds: int = 41, device: str = "cpu"
) -> dict[str, float]:
    """Return the median time of a call for each contestant.

    The contestants are called alternately, so that load on the machine slows all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 2):
        for name, run in contestants.items():
            _synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            _synchronize(device)
            # The first two rounds are warm-up: they fill caches and compile code.
            if round_number > 1:
                samples[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def store(benchmark: str, rows: list[Row], device: str) -> Path:
    """Write the rows with the machine's name and torch's version; return the path.

    Other rows of the same machine and torch are kept: a benchmark may be run in parts.
    """
    path = results_path(benchmark, device)
    record: dict[str, Any] = {
        "machine": mezzo.hardware(device).name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    if path.exists() and (old := json.loads(path.read_text())) | {"rows": []} == record:
        record = old
    kept = {row["name"]: row for row in record["rows"]}
    record["rows"] = list((kept | {row.name: asdict(row) for row in rows}).values())
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def results_path(benchmark: str, device: str) -> Path:
    """Return the file for the results of a benchmark on this machine."""
    RESULTS.mkdir(exist_ok=True)
    machine = re.sub(r"[^a-z0-9]+", "-", mezzo.hardware(device).name.lower()).strip("-")
    return RESULTS / f"{benchmark}-{machine}.json"


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
