"""How the benchmarks measure: contestants take turns in one run, medians are compared, and results are stored with the machine's name."""

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
    """One comparison: medians in microseconds, and the number that the comparison is about."""

    name: str
    times: Mapping[str, float]
    """Contestant → median time of one call in microseconds."""
    value: float
    """What is compared, as `unit` says."""
    unit: str
    bar: float
    """The value should be at most this."""

    def __str__(self) -> str:
        times = "  ".join(f"{name} {median:.2f} µs" for name, median in self.times.items())
        return f"{self.name:46} {self.value:7.3f} {self.unit:4} (at most {self.bar:g})   {times}"


def take_turns(
    contestants: Mapping[str, Contestant], *, calls: int, rounds: int = 41, device: str = "cpu"
) -> dict[str, float]:
    """Median time of a call for each contestant. They take turns, so that what slows the machine slows all of them."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 2):
        for name, run in contestants.items():
            _wait(device)
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            _wait(device)
            # Two rounds warm up: caches, plans and compiled code are made in them.
            if round_number > 1:
                samples[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def store(benchmark: str, rows: list[Row], device: str) -> Path:
    """Write the rows beside the machine's name and torch's version. Other rows of the same machine and torch stay: a benchmark may be run in parts."""
    machine = mezzo.hardware(device).name
    path = RESULTS / f"{benchmark}-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"
    record: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    if path.exists() and (old := json.loads(path.read_text())) | {"rows": []} == record:
        record = old
    kept = {row["name"]: row for row in record["rows"]}
    record["rows"] = list((kept | {row.name: asdict(row) for row in rows}).values())
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
