"""Planted faults: the op, module, line, pass and step that are reported, and the cure."""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
EAGER = [
    "attention logits",
    "cumsum",
    "custom op with a wrong backward",
    "division by underflow",
    "exp",
    "gradient underflow",
    "infinity in the data",
    "learning rate",
    "log of zero",
    "masked log",
    "norm with clamp 1e-12",
    "root of zero",
    "softmax of a masked row",
    "sum of squares",
    "variance by hand, O2",
]
COMPILED = ["RMS norm, compiled", "log of zero, compiled", "entropy, compiled"]


@pytest.fixture(scope="module")
def faults():
    sys.path.append(FOLDER)
    import faults

    yield faults
    sys.path.remove(FOLDER)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [*EAGER, *COMPILED])
def test_what_is_reported_is_what_was_planted(faults, name):
    report = faults.run_fault(faults.BY_NAME[name], "cpu")
    assert not report.wrong, report.text


def test_there_are_fifty_faults_of_all_kinds_of_runs(faults):
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 50
    runs = {fault.run for fault in faults.FAULTS}
    assert runs == {"eager", "compiled", "captured", "distributed"}
