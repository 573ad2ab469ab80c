"""`mezzo compare` as a user runs it: tables, JSON, pages, wrong arguments, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from support.command_line import run_mezzo
from torch import nn
from torch.nn import functional as F

from mezzo._errors import MezzoError
from mezzo.cli import compare as comparing
from mezzo.cli.product_times import ProductTime
from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.workload import Documented, Preset, Workload

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")

FACTORIES = """
import torch
from torch import nn

print("imported")

def tiny():
    return {"model": nn.Linear(8, 2), "sample": (torch.ones(16, 8), torch.zeros(16, 2)),
            "loss_fn": nn.functional.mse_loss}

def raises():
    raise ValueError("no data here")

def mistyped():
    return {"model": nn.Linear(8, 2), "sample": torch.ones(16, 8), "los_fn": None}

def without_sample():
    return nn.Linear(8, 2)

def wrong_shape():
    return nn.Linear(8, 2), torch.ones(16, 3)

class Endless(nn.Linear):
    calls = 0
    def forward(self, x):
        Endless.calls += 1
        if Endless.calls == 30:  # float32 has trained; O1 has begun
            open("started", "w").close()
        if Endless.calls >= 30:
            import time
            time.sleep(0.05)
        return super().forward(x)

def endless():
    return Endless(8, 2), torch.ones(16, 8)
"""
QUICK = ("--device", "cpu", "--steps", "2", "--rounds", "1")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(FACTORIES)
    return tmp_path


def load_workload(name, preset, data=None):
    if name == "broken":
        raise MezzoError("scikit-learn is not installed.")
    title = f"a linear layer, {preset}, {data}"
    return Workload(
        name,
        title,
        preset,
        "synthetic",
        lambda: nn.Linear(4, 2),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda _: (torch.ones(8, 4), torch.zeros(8, 2)),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        samples=8,
        steps=3,
        documented=(Documented("O1", 4.5, "PaddlePaddle, V100"),),
    )


def run_programs(preset, device, steps, progress=lambda mode: None):
    progress("dynamic O1")
    mode = ModeResult("dynamic O1", "bfloat16", 1.0, note=f"{device} {steps}")
    return Comparison(
        "paddle-programs",
        "eight programs",
        str(preset),
        "synthetic",
        "CPU",
        "2",
        "0",
        3,
        1,
        (mode,),
    )


@pytest.fixture
def workloads(monkeypatch):
    """Replace the built-in workloads by small ones, one of which cannot be loaded."""
    registry = types.ModuleType("mezzo.comparing.builtin_workloads")
    registry.WORKLOADS = {"first": "a first one", "broken": "one that fails", "last": "a last one"}
    registry.load_workload = load_workload
    programs = types.ModuleType("mezzo.comparing.paddle_runs")
    programs.run_programs, programs.PROGRAMS = run_programs, ("dynamic O1",)
    monkeypatch.setitem(sys.modules, "mezzo.comparing.builtin_workloads", registry)
    monkeypatch.setitem(sys.modules, "mezzo.comparing.paddle_runs", programs)


# -- what is printed -------------------------------------------------------------------------------


def test_a_factory_gets_a_table_the_notes_and_a_verdict(folder):
    finished = run_mezzo(folder, "compare", "train:tiny", *QUICK, "--modes", "tf32,O1")
    assert finished.code == 0, finished.stderr
    assert finished.stderr == "imported\n"
    lines = finished.stdout.splitlines()
    assert lines[0] == "train:tiny: Linear, batch 16, AdamW; data: the sample of the factory"
    header = next(line for line in lines if "samples/s" in line)
    assert header.split()[:3] == ["mode", "dtype", "ms"]
    assert "note" not in header
    assert any(line.split()[:2] == ["O1", "bfloat16"] for line in lines), finished.stdout
    assert "TF32: not run: needs an NVIDIA GPU" in lines
    assert "float32" in lines[-2]
    assert max(map(len, lines[:9])) <= 200


def test_json_is_the_whole_of_stdout_and_can_be_read_back(folder):
    finished = run_mezzo(
        folder, "compare", "train:tiny", *QUICK, "--modes", "O2", "--dtype", "float16", "--json"
    )
    result = Comparison.from_json(json.loads(finished.stdout))
    assert (result.workload, result.steps, result.rounds) == ("train:tiny", 2, 1)
    assert result.mode("O2").dtype == "float16"
    assert result.complete


def test_a_page_is_written_and_named(folder):
    finished = run_mezzo(
        folder, "compare", "train:tiny", *QUICK, "--modes", "O1", "--report", "out.html"
    )
    assert finished.code == 0, finished.stderr
    assert finished.stdout.endswith("Report: out.html\n")
    assert "train:tiny" in (folder / "out.html").read_text()


def test_workloads_are_listed(folder, workloads):
    finished = run_mezzo(folder, "compare", "--list")
    assert finished.stdout.splitlines()[0] == "first            a first one"
    assert "paddle-programs" in json.loads(run_mezzo(folder, "compare", "--list", "--json").stdout)


def test_a_built_in_workload_is_small_on_a_cpu_and_has_the_numbers_of_its_document(
    folder, workloads
):
    finished = run_mezzo(folder, "compare", "first", "--device", "cpu", "--modes", "O1")
    assert finished.stdout.startswith("first: a linear layer, small, None; data: synthetic\n")
    assert "PaddlePaddle, V100: O1 is 4.5 times as fast as float32\n" in finished.stdout


def test_preset_and_data_are_passed_to_the_workload(folder, workloads):
    options = ("--preset", "full", "--data", ".", *QUICK, "--modes", "float32")
    finished = run_mezzo(folder, "compare", "last", *options)
    assert finished.stdout.startswith("last: a linear layer, full, .; data"), finished.stderr


def test_all_runs_every_workload_and_goes_on_after_one_that_fails(folder, workloads):
    finished = run_mezzo(folder, "compare", "all", *QUICK, "--modes", "float32", "--json")
    assert finished.code == 2
    assert finished.stderr == "mezzo: broken: scikit-learn is not installed.\n"
    found = [one["workload"] for one in json.loads(finished.stdout)]
    assert found == ["first", "last", "paddle-programs"]


def test_the_programs_of_paddle_get_preset_device_and_steps(folder, workloads):
    finished = run_mezzo(folder, "compare", "paddle-programs", *QUICK, "--json")
    result = json.loads(finished.stdout)
    assert (result["preset"], result["modes"][0]["note"]) == ("small", "cpu 2")


# -- what is refused -------------------------------------------------------------------------------


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(
    folder, workloads, monkeypatch
):
    monkeypatch.setattr("mezzo.cli.console.find_spec", lambda _: None)
    finished = run_mezzo(folder, "compare", "first", *QUICK, "--report", "out.html")
    assert (finished.code, finished.stdout) == (2, "")
    assert finished.stderr.splitlines()[-1] == (
        "mezzo: The report needs plotly, which is not installed. Run: pip install 'mezzo[report]'"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Pass a workload, or a factory of your own. Choose one of: first, broken, last,"),
        (
            ("frist",),
            "There is no workload 'frist'. Choose one of: first, broken, last, paddle-pro",
        ),
        (("first", "--preset", "big"), "--preset 'big' is no size. Choose one of: full, small."),
        (("first", "--data", "missing"), "There is no folder 'missing' for --data."),
        (("all", "--data", "."), "--data is for one workload: pass its name instead of all."),
        (("first", "--modes", "O1,O7"), "There is no mode 'O7'. Choose one of: float32, TF32,"),
        (("first", "--dtype", "int8", *QUICK), "dtype='int8' is not a dtype that can be used"),
        (("first", "--steps", "0"), "Invalid value for '--steps': "),
        (("first", "--report", "no/out.html"), "'no/out.html' is no file in an existing folder."),
        (("missing.py:make",), "There is no file 'missing.py'."),
        (("train:nothing",), "train has no 'nothing'."),
        (("train:mistyped",), "train:mistyped returned a dictionary with 'los_fn'. Choose one of:"),
        (("train:without_sample",), "train:without_sample returned no sample. Return (model,"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(folder, workloads, arguments, message):
    finished = run_mezzo(folder, "compare", *arguments)
    assert (finished.code, finished.stdout) == (2, "")
    lines = finished.stderr.removeprefix("imported\n").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"mezzo: {message}")


@pytest.mark.parametrize(
    ("factory", "error"),
    [("raises", "ValueError: no data here"), ("wrong_shape", "RuntimeError: .*mat1 and mat2")],
)
def test_a_factory_or_a_model_that_raises_shows_its_traceback(folder, factory, error):
    finished = run_mezzo(folder, "compare", f"train:{factory}", *QUICK)
    assert (finished.code, finished.stdout) == (2, "")
    *frames, last = finished.stderr.removeprefix("imported\n").splitlines()
    assert frames[0] == "Traceback (most recent call last):"
    assert re.match(f"mezzo: train:{factory} raised {error}", last)


# -- Ctrl-C and the terminal -----------------------------------------------------------------------


def test_ctrl_c_writes_what_was_measured_and_restores_the_terminal(folder):
    terminal, side = pty.openpty()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    options = "--device cpu --modes O1 --steps 25 --json --report out.html".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "mezzo", "compare", "train:endless", *options],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=side,
    )
    os.close(side)
    shown = b""
    deadline = time.monotonic() + 60
    while not (folder / "started").exists() and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 100_000)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    shown += os.read(terminal, 100_000)
    os.close(terminal)
    text = shown.decode()
    assert process.returncode == 130, text
    result = Comparison.from_json(json.loads(output))
    assert not result.complete
    assert result.mode("float32").loss is not None
    assert result.mode("O1").note == "not run: interrupted"
    assert "train:endless: train 25 steps in float32" in text
    assert "Report: out.html" in text
    assert (folder / "out.html").exists()
    assert text.endswith("mezzo: interrupted\r\n")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert "Traceback" not in text


def test_ctrl_c_in_one_of_several_workloads_keeps_those_before(workloads, monkeypatch):
    def interrupted(workload, **_):
        if workload.name == "last":
            raise KeyboardInterrupt
        return run_programs(Preset.SMALL, "cpu", 1)

    monkeypatch.setattr(comparing, "compare", interrupted)
    results = comparing.run_workloads("all", comparing.Options(Preset.SMALL, device="cpu"))
    assert len(results.comparisons) == 1
    assert results.exit_code == 130


# -- CPUs that trap instructions -------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["SIGILL", None])
def test_a_cpu_that_traps_its_16_bit_instructions_gets_the_limit_of_doctor(
    monkeypatch, capsys, failure
):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    times = (ProductTime("bfloat16", None if failure else 1.0, failure),)
    monkeypatch.setattr(comparing, "time_products", lambda *_: times)
    comparing._avoid_trapped_instructions("cpu")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    assert limit == ("AVX512_CORE_FP16" if failure else None)
    assert ("AVX512_CORE_FP16" in capsys.readouterr().err) == bool(failure)
