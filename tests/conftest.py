"""Facts about other systems, as several tests need them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: the same oneDNN kernels on every machine, so that what rounds in a test
# does not depend on it. Some virtual machines advertise AMX and trap its instructions, which ends
# the process, in plain torch too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class OracleRow:
    """One op of PaddlePaddle on one mix of input dtypes; dtypes are letters: f float32, h the half type, b bool, i int64."""

    op: str
    listed: str
    """The name that Paddle's custom white or black list held in the variants that have one."""
    half: str
    inputs: str
    ops: tuple[str, ...]
    """The ops that Paddle ran, in its own names."""
    results: dict[str, tuple[str, str]]
    """Level and variant → the output's dtype, and the dtype each of the ops ran in."""


@pytest.fixture(scope="session")
def paddle_rows() -> list[OracleRow]:
    def results(text: str) -> dict[str, tuple[str, str]]:
        pairs = (word.split("=") for word in text.split())
        return {level: (outcome[0], outcome[2:]) for level, outcome in pairs}

    rows = json.loads((_DATA / "paddle-autocast.json").read_text())["rows"]
    return [
        OracleRow(
            row["op"],
            row["listed"],
            row["half"],
            row["inputs"],
            tuple(row["ops"].split()),
            results(row["results"]),
        )
        for row in rows
    ]


@pytest.fixture(scope="session")
def system_lists() -> dict[str, Any]:
    """Each system's lists as its own source has them, in its own names."""
    lists: dict[str, Any] = json.loads((_DATA / "system-op-lists.json").read_text())
    return lists
