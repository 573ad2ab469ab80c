"""`hardware()`: cached, emits events, queries nothing at import."""

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


def test_a_device_is_probed_once_under_all_its_names(monkeypatch):
    probed = []
    monkeypatch.setattr(
        _hardware,
        "probe",
        lambda device, probe=_hardware.probe: probed.append(device) or probe(device),
    )
    assert hardware("cpu") is hardware(torch.device("cpu")) is hardware("cpu:0")
    assert probed == [torch.device("cpu")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_nothing_is_supported_on_a_device_that_this_machine_lacks():
    found = hardware("cuda")
    assert found.preferred is None
    assert found.float16.reason.startswith("no CUDA device is visible")


def test_every_call_emits_an_event():
    hardware("cpu")
    with listen() as events:
        found = hardware("cpu")
    native = tuple(str(dtype).removeprefix("torch.") for dtype in found.native_dtypes)
    assert events == [HardwareDetected("cpu", found.name, native)]


def test_importing_queries_no_device():
    program = "import mezzo._hardware as h; raise SystemExit(h._detect.cache_info().misses)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.gpu
def test_a_real_gpu_agrees_with_torch():
    found = hardware("cuda")
    assert found.name == torch.cuda.get_device_name()
    assert found.bfloat16.native == torch.cuda.is_bf16_supported(including_emulation=False)
    assert found == hardware()
