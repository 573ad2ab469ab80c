"""The example of an overflow and the benchmarks for a CPU run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mezzo

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

BENCHMARKS = """
import dataclasses, json, sys
sys.path.append("benchmarks")
import autocast, convert, long_run, numerics, optim, scaling, step  # most need a GPU to run
convert.SIZES = (50,)
rows = [*convert.planning(), *scaling.cpu_rows(rounds=1)]
print(json.dumps([dataclasses.asdict(row) for row in rows]))
"""


def run(program):
    paths = [str(ROOT / "tests"), str(Path(mezzo.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_an_overflow_names_it_and_trains_with_the_suggested_policy(capsys):
    pytest.importorskip("sklearn")
    path = ROOT / "examples" / "overflow.py"
    spec = importlib.util.spec_from_file_location("overflow", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.EPOCHS = 1
    example.main()
    in_float32, in_float16, cured = re.split(
        r"^in float16", capsys.readouterr().out, flags=re.MULTILINE
    )
    (line,) = [
        number
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if "scores = " in text
    ]
    assert "the loss of step" in in_float16
    assert f"matmul (overflow.py:{line}, in attention) left the range of float16" in in_float16
    assert "Pass modules={'attention': 'full'} (verified" in in_float16
    assert "modules={'attention': 'full'}" in cured
    for printed in (in_float32, cured):
        first, last = map(float, re.search(r"loss (\S+) → (\S+)", printed).groups())
        assert last < first / 2


@pytest.mark.exhaustive
def test_the_benchmarks_for_a_cpu_give_rows_of_the_stored_results():
    rows = json.loads(run(BENCHMARKS).splitlines()[-1])
    assert any(row["name"].startswith("plan ") and row["value"] > 0 for row in rows)
    stored = {
        row["name"]
        for path in (ROOT / "benchmarks" / "results").glob("scaling-*.json")
        for row in json.loads(path.read_text())["rows"]
    }
    assert {row["name"] for row in rows if "overhead" in row["name"]} <= stored
