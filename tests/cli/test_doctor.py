"""`mezzo doctor`: what it reads from a machine, and what it concludes."""

import json
import sys
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from mezzo._hardware import Hardware, Support
from mezzo.cli import machine as machines
from mezzo.cli.app import app
from mezzo.cli.doctor import diagnose
from mezzo.cli.machine import Extra, Machine
from mezzo.cli.product_times import ProductTime, time_products

NATIVE = Support(supported=True, native=True, reason="it has tensor cores")
EMULATED = Support(supported=True, native=False, reason="torch emulates it in software")
GPU = Hardware("cuda", "NVIDIA H200", "9.0", float16=NATIVE, bfloat16=NATIVE)
CPU = Hardware("cpu", "Intel Xeon", "avx512", float16=EMULATED, bfloat16=NATIVE)
FAST = Machine(
    "0.1", "2.13.0", "3.12.1", "Linux", GPU, triton=True, tf32=True, cudnn_benchmark=True
)
ON_CPU = replace(FAST, device=CPU, triton=False)

# In place of products: prints fixed times, dies in bfloat16, and raises in float64.
PROGRAM = """
import json, os, signal, sys
for name in sys.argv[3:]:
    if name == "bfloat16" and os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_FP16":
        os.kill(os.getpid(), signal.SIGILL)
    if name == "float64":
        raise MemoryError("no room")
    print(json.dumps([name, 0.5]), flush=True)
"""


def times(**seconds):
    return tuple(
        ProductTime(name, value) if isinstance(value, float) else ProductTime(name, None, value)
        for name, value in seconds.items()
    )


def texts(machine, *, traps=False):
    diagnosis = diagnose(machine)
    return " ".join(
        f"{note.text} {note.remedy}" for note in (diagnosis.traps if traps else diagnosis.notes)
    )


def test_a_dtype_that_kills_the_process_leaves_the_others_measured():
    dtypes = ["float32", "bfloat16", "float64", "float16"]
    found = time_products("cpu", dtypes, program=PROGRAM)
    assert found == (
        ProductTime("float32", 0.5),
        ProductTime("bfloat16", None, "SIGILL"),
        ProductTime("float64", None, "MemoryError: no room"),
        ProductTime("float16", 0.5),
    )


def test_the_environment_of_a_measurement_can_be_set():
    limit = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    assert time_products("cpu", ["bfloat16"], limit, program=PROGRAM)[0].seconds == 0.5


def test_products_of_this_machine_are_timed():
    (found,) = time_products("cpu", ["float32"])
    assert found.failure is None
    assert 0 < found.seconds < 10


def test_products_that_die_are_repeated_without_amx(monkeypatch):
    calls = []

    def fake(device, dtypes, environment=None):
        calls.append((tuple(dtypes), environment))
        failed = {} if environment else {"bfloat16": "SIGILL"}
        return times(**{name: failed.get(name, 0.1) for name in dtypes})

    monkeypatch.setattr(machines, "time_products", fake)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 1
    assert calls == [
        (("float32", "float16", "bfloat16"), None),
        (("bfloat16",), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
    ]
    assert "! A product in bfloat16 failed" in result.stdout
    assert "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, with which it runs here." in result.stdout


def test_a_fast_machine_has_nothing_to_change():
    measured = times(float32=0.8, tf32=0.2, float16=0.1, bfloat16=0.1)
    diagnosis = diagnose(replace(FAST, products=measured))
    speeds = {"float32": 1, "tf32": 4, "float16": 8, "bfloat16": 8}
    assert diagnosis.speeds == pytest.approx(speeds)
    assert diagnosis.to_dict()["speeds"] == speeds
    assert [note.remedy for note in diagnosis.notes] == [
        "Train with dtype='bfloat16', without loss scaling."
    ]
    assert not diagnosis.has_problem
    assert "bfloat16  product  100.000 ms   8.00 × float32" in str(diagnosis)


def test_a_device_without_a_16_bit_dtype_is_a_problem():
    absent = Support(supported=False, native=False, reason="no CUDA device is visible")
    device = Hardware("cuda", "no CUDA device", "", float16=absent, bfloat16=absent)
    diagnosis = diagnose(replace(FAST, device=device))
    assert diagnosis.has_problem
    assert "16 bits here: no CUDA device is visible. Choose another device" in str(diagnosis)


def test_an_emulated_dtype_is_named_with_the_reason():
    text = texts(replace(ON_CPU, products=times(float32=0.1, float16=6.7, bfloat16=0.04)))
    assert "float16 is 67.0 times slower than float32 here: torch emulates it in software" in text
    assert "Do not train in float16 on this device." in text
    assert "Train in float32" not in text
    assert "Train with dtype='bfloat16', without loss scaling." in text


def test_a_limit_of_the_instruction_set_is_the_reason_of_slow_products():
    text = texts(replace(ON_CPU, products=times(float32=0.1, bfloat16=1.0), isa_limit="AVX2"))
    assert "here: ONEDNN_MAX_CPU_ISA=AVX2 limits the instructions." in text


def test_a_limit_of_the_instruction_set_under_which_16_bits_gain_nothing_is_named():
    equal = replace(ON_CPU, products=times(float32=0.1, bfloat16=0.1))
    text = texts(replace(equal, isa_limit="AVX512_CORE_FP16"))
    assert "here: ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 limits the instructions. If" in text
    assert "no faster" not in texts(equal)


def test_float16_alone_comes_with_the_advice_to_scale():
    text = texts(replace(FAST, products=times(float32=0.4, float16=0.1, bfloat16=0.4)))
    assert "Train with dtype='float16', with a GradScaler." in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"triton": False}, "Run: pip install triton"),
        ({"tf32": False}, "torch.set_float32_matmul_precision('high')"),
        ({"cudnn_benchmark": False}, "torch.backends.cudnn.benchmark = True"),
        ({"device": CPU, "nvidia_driver": True}, "Install a CUDA build of torch"),
        ({"device": CPU, "threads": 2, "cores": 8}, "torch uses 2 of 8 cores"),
        ({"torch": "2.19.0+cu140"}, "mezzo is tested on torch 2.11 to 2.15, this is 2.19.0+cu140"),
        ({"torch": "2.9.1", "lacking": ("weight cache",)}, "It lacks what these need: weight cach"),
        ({"products": times(float32="OutOfMemoryError")}, "failed on NVIDIA H200: OutOfMemoryErr"),
        ({"products": times(bfloat16="SIGILL")}, "which does not cure it here"),
    ],
)
def test_each_setting_has_a_note(change, message):
    assert message in texts(replace(FAST, **change))
    assert message not in texts(FAST)


@pytest.mark.parametrize(
    ("version", "has", "lacks"),
    [
        ("2.11.0", "rms_norm", "torch.qr"),
        ("2.12.1", "for bfloat16 from the cache", "rms_norm"),
        ("2.14.0a0+git1", "torch.qr", "from the cache"),
    ],
)
def test_traps_depend_on_the_version_of_torch(version, has, lacks):
    text = texts(replace(FAST, torch=version), traps=True)
    assert has in text
    assert lacks not in text


def test_missing_extras_are_named_with_the_command_that_installs_them(tmp_path):
    folder = tmp_path / "mezzo-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Name: mezzo\nVersion: 0.1\nRequires-Dist: torch>=2.11\n"
        "Requires-Dist: typer>=0.15; extra == 'cli'\n"
        'Requires-Dist: no-such-package>=1; (python_version > "3.8") and extra == "plots"\n'
        "Requires-Dist: no-such-tool; extra == 'dev'\n"
    )
    found = machines._extras(metadata.distributions(name="mezzo", path=[str(tmp_path)]))
    assert found == (Extra("cli", ()), Extra("plots", ("no-such-package",)))
    text = str(diagnose(replace(FAST, extras=found)))
    assert "plots        lacks no-such-package: pip install 'mezzo[plots]'" in text


def test_packages_that_stand_in_for_others_are_installed(tmp_path, monkeypatch):
    folder = tmp_path / "pytorch_lightning-2.6.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: pytorch-lightning\nVersion: 2.6\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert machines._is_installed("lightning")
    assert not machines._is_installed("accelerate")


def test_json_has_the_versions_and_the_support_of_the_device():
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--no-measure", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["torch"] == torch.__version__
    assert data["python"] == ".".join(map(str, sys.version_info[:3]))
    assert data["device"]["device"] == "cpu"
    assert data["products"] == []


def test_an_unknown_device_is_an_error_of_one_line():
    result = CliRunner().invoke(app, ["doctor", "--device", "gpu"])
    assert result.exit_code == 2
    assert result.stderr.startswith("mezzo: Unknown device 'gpu'. This machine has: cpu")
    assert result.stderr.count("\n") == 1
