"""Test the demo: what it prints, and the report that it writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.comparisons import gpu_result

import mezzo
from mezzo.comparing import demo

pytest.importorskip("sklearn")

DEMO = """
from pathlib import Path
from mezzo.comparing import demo
from support.comparisons import gpu_result
demo.stored_results = lambda: (gpu_result(), gpu_result("digits"))
demo.main(epochs=1, report=Path("demo.html"))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The demo with one epoch, as a process: its output and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    paths = [str(Path(__file__).parents[1]), str(Path(mezzo.__file__).parents[1])]
    # Some machines report AMX but trap it.
    limit = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"} | os.environ
    settings = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", DEMO],
        cwd=folder,
        env=limit | settings | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_the_demo_ends_with_the_report_that_it_wrote(run):
    printed, folder = run
    last = printed.splitlines()[-1]
    assert last == f"Report, with charts and all numbers: {folder / 'demo.html'}"
    text = (folder / "demo.html").read_text()
    assert "digits: 2 convolutions and 2 linear layers" in text
    assert "NVIDIA H200, torch 2.11.0" in text


def test_the_demo_prints_casts_bytes_and_accuracy_of_each_mode(run):
    printed, _ = run
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if "MiB" in line}
    assert {"float32", "torch.amp", "O1", "O2"} <= set(rows)
    accuracies = {name: float(rows[name][-1].rstrip("%")) for name in ("float32", "O1", "O2")}
    assert max(accuracies.values()) - min(accuracies.values()) <= 5
    assert rows["float32"][-3] == "0"
    assert int(rows["O1"][-3]) > 0


def test_the_demo_shows_stored_results_of_other_machines(run):
    printed, _ = run
    assert re.search(r" cifar +NVIDIA H200.* O2 captured float16 +9\.00 +4\.44", printed)


def test_the_digits_learn_with_the_same_batches_every_time():
    workload = demo.digits_workload(epochs=1)
    first, again = workload.make_batch(3), workload.make_batch(3)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    for number in range(workload.steps):
        optimizer.zero_grad()
        workload.loss(model, workload.make_batch(number)).backward()
        optimizer.step()
    with torch.no_grad():
        assert workload.evaluate(model.eval()) > 0.8


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn.datasets", "scikit-learn"), ("rich.console", "rich")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(demo, "stored_results", lambda: (gpu_result(),))
    wanted = rf"demo needs {package}, .*pip install 'mezzo\[demo\]'"
    with pytest.raises(mezzo.UnsupportedError, match=wanted):
        demo.main()
