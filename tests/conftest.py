"""Fixtures and plugins of all tests: what other systems do, and which tests run when."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: use the same oneDNN kernels on every machine, so that rounding does not
# depend on it. Some virtual machines advertise AMX but trap its instructions, which ends the
# process, in plain torch too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# Tests fork processes, which would wait for OpenMP threads that a fork does not copy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As shells start background jobs, and processes inherit it: tests send Ctrl-C to some.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["support.tiers"]
# Scripts that tests run; doctests would import them.
collect_ignore = ["support/scripts"]


@pytest.fixture
def process_group(tmp_path: Path) -> Generator[None, None, None]:
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


_DATA = Path(__file__).parent / "data"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt imported modules and collected tests, which stay alive, from garbage collection.

    Each collection would visit their millions of objects, and tests collect garbage hundreds of
    times to check that nothing keeps a model alive.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Exempt modules too that a test has imported, such as those of transformers."""
    if len(sys.modules) > _modules_at_freeze + 100:
        gc.collect()
        _freeze()


_modules_at_freeze = 0


def _freeze() -> None:
    global _modules_at_freeze
    gc.freeze()
    _modules_at_freeze = len(sys.modules)


@dataclass(frozen=True)
class OracleRow:
    """One op of PaddlePaddle on one mix of input dtypes.

    A dtype is one character: f float32, h the 16-bit dtype, b bool, i int64.
    """

    op: str
    listed: str
    """The op name in Paddle's custom white or black list, in the variants that have one."""
    half: str
    inputs: str
    ops: tuple[str, ...]
    """The ops that Paddle ran, by its own names."""
    results: dict[str, tuple[str, str]]
    """Level and variant → dtype of the output, and dtype in which each of the ops ran."""


@pytest.fixture(scope="session")
def paddle_rows() -> list[OracleRow]:
    """Return what PaddlePaddle was recorded to do with each op."""

    def results(text: str) -> dict[str, tuple[str, str]]:
        pairs = (pair.split("=") for pair in text.split())
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
    """Return the op lists of each system as in its source, by its own names."""
    lists: dict[str, Any] = json.loads((_DATA / "system-op-lists.json").read_text())
    return lists
