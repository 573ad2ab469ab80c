"""`hardware()`: found once, told to those who listen, cheap to import."""

import subprocess
import sys

import pytest
import torch

from mezzo import _hardware
from mezzo._events import HardwareDetected, listen
from mezzo._hardware import hardware


@pytest.fixture(autouse=True)
def _fresh_cache():
    _hardware._detect.cache_clear()
    yield
    _hardware._detect.cache_clear()


def test_the_cpu_supports_both_dtypes():
    found = hardware("cpu")
    assert (found.device, found.float16.supported, found.bfloat16.supported) == ("cpu", True, True)


def test_a_device_is_probed_once_however_it_is_called(monkeypatch):
    probed = []
    monkeypatch.setattr(
        _hardware,
        "probe",
        lambda device, probe=_hardware.probe: probed.append(device) or probe(device),
    )
    assert hardware("cpu") is hardware(torch.device("cpu")) is hardware("cpu:0")
    assert probed == [torch.device("cpu")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what a machine without CUDA answers")
def test_a_device_that_is_not_here_answers_that_nothing_is_supported():
    found = hardware("cuda")
    assert found.preferred is None
    assert found.float16.reason.startswith("no CUDA device is visible")


def test_whoever_listens_hears_every_question():
    hardware("cpu")
    with listen() as heard:
        found = hardware("cpu")
    fast = tuple(str(dtype).removeprefix("torch.") for dtype in found.native_dtypes)
    assert heard == [HardwareDetected("cpu", found.name, fast)]


def test_importing_asks_no_device():
    program = "import mezzo._hardware as h; raise SystemExit(h._detect.cache_info().misses)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.gpu
def test_a_real_gpu_agrees_with_torch():
    found = hardware("cuda")
    assert found.name == torch.cuda.get_device_name()
    assert found.bfloat16.native == torch.cuda.is_bf16_supported(including_emulation=False)
    assert found == hardware()
