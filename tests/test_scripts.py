"""The comparison of the digits and the benchmarks for a CPU run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mezzo

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

# scikit-learn is not installed for tests: images of digits are generated instead.
EXAMPLE = """
import runpy, sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from support.digits import images_of_digits

def load_digits(return_X_y):
    images, digits = images_of_digits(320, 0, 0.1)
    return images.flatten(1).numpy(), digits.numpy()

def train_test_split(images, digits, **_):
    return images[64:], images[:64], digits[64:], digits[:64]

for name, function in (("datasets", load_digits), ("model_selection", train_test_split)):
    module = ModuleType(f"sklearn.{name}")
    setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
sys.modules["sklearn"] = ModuleType("sklearn")
sys.modules["sklearn"].__spec__ = ModuleSpec("sklearn", None)
runpy.run_path("examples/digits.py", run_name="__main__")
"""

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


def test_the_example_trains_and_prints_its_table():
    printed = run(EXAMPLE)
    assert "test accuracy" in printed
    assert "2 × float32" in printed
    assert "Measured: mixed precision was" in printed


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
