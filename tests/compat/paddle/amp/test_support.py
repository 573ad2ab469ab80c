"""Supported dtypes, and the warnings on devices that compute them slowly."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mezzo
from mezzo._hardware.detect import Backend, DeviceFacts
from mezzo._hardware.support import judge
from mezzo.compat import paddle
from mezzo.compat.paddle.amp import _auto_cast, _support

GTX_1080 = DeviceFacts("cuda", "GeForce GTX 1080", Backend.CUDA, capability="6.1")
K40 = DeviceFacts("cuda", "Tesla K40m", Backend.CUDA, capability="3.5")
V100 = DeviceFacts("cuda", "Tesla V100", Backend.CUDA, capability="7.0")
H200 = DeviceFacts("cuda", "NVIDIA H200", Backend.CUDA, capability="9.0")
RX580 = DeviceFacts("cuda", "AMD RX 580", Backend.ROCM, capability="gfx803")
CPU = DeviceFacts("cpu", "Old CPU", Backend.CPU, capability="avx2")


@pytest.fixture
def use_device(monkeypatch):
    """Return a function that makes the default place a device with the given facts."""

    def use(facts: DeviceFacts) -> None:
        monkeypatch.setattr(_support, "hardware", lambda _: judge(facts))
        monkeypatch.setattr(_support, "_checked", set())
        _auto_cast._cached_region.cache_clear()

    return use


NVIDIA = (
    r"^AMP only support NVIDIA GPU with Compute Capability {} or higher, current GPU is: {}, with"
    r" Compute Capability: {}\. "
)


@pytest.mark.parametrize(
    ("facts", "dtype", "message"),
    [
        (
            GTX_1080,
            "float16",
            NVIDIA.format("7.0", "GeForce GTX 1080", "6.1") + "float16 runs here, slowly: .*no ten",
        ),
        (K40, "float16", NVIDIA.format("7.0", "Tesla K40m", "3.5") + "Everything runs in float32"),
        (
            V100,
            "bfloat16",
            NVIDIA.format("8.0", "Tesla V100", "7.0") + r".*through float32.*dtype='float16'\.$",
        ),
        (
            RX580,
            "float16",
            r"^AMP is slow on AMD RX 580 \(cuda, gfx803\)\. float16 runs",
        ),
        (CPU, "bfloat16", r"^AMP is slow on Old CPU \(cpu, avx2\)\. .*emulates it in software"),
    ],
    ids=["6.1", "3.5", "7.0", "rocm", "cpu"],
)
@pytest.mark.parametrize("entry", ["auto_cast", "decorate"])
def test_a_device_without_the_dtype_warns_once_and_runs(entry, facts, dtype, message, use_device):
    def enter():
        if entry == "auto_cast":
            paddle.amp.auto_cast(dtype=dtype)
        else:
            paddle.amp.decorate(models=nn.Linear(2, 2), level="O2", dtype=dtype)

    use_device(facts)
    with pytest.warns(UserWarning, match=message) as warned:
        enter()
    assert [one.filename for one in warned] == [__file__]
    enter()
    with paddle.amp.auto_cast(dtype=dtype, level="O2"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is getattr(torch, dtype)


@pytest.mark.parametrize(
    ("facts", "kwargs"),
    [
        (V100, {}),
        (H200, {"dtype": "bfloat16"}),
        (GTX_1080, {"enable": False}),
        (GTX_1080, {"level": "O0"}),
    ],
    ids=["7.0", "9.0", "disabled", "O0"],
)
def test_a_device_with_the_dtype_and_a_disabled_region_do_not_warn(facts, kwargs, use_device):
    use_device(facts)
    with warnings.catch_warnings(), paddle.amp.auto_cast(**kwargs):
        pass
    paddle.amp.decorate(models=nn.Linear(2, 2), level="O1")


def test_a_compiled_region_warns_too(use_device):
    use_device(GTX_1080)
    torch._dynamo.reset()

    def run(x):
        with paddle.amp.auto_cast():
            return x @ x

    with pytest.warns(UserWarning, match="with Compute Capability: 6.1"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 2))


@pytest.mark.parametrize("device", [None, "cpu", paddle.CPUPlace(), torch.device("cpu")], ids=str)
def test_supported_dtypes_are_those_of_the_hardware(device):
    facts = mezzo.hardware("cpu" if device is not None else None)
    assert paddle.amp.is_float16_supported(device) is facts.float16.supported
    assert paddle.amp.is_bfloat16_supported(device) is facts.bfloat16.supported


@pytest.mark.parametrize(
    ("facts", "float16", "bfloat16"),
    [(K40, False, True), (GTX_1080, True, True), (H200, True, True)],
    ids=["3.5", "6.1", "9.0"],
)
def test_a_gpu_supports_float16_from_capability_5_3_on(facts, float16, bfloat16, use_device):
    use_device(facts)
    assert paddle.amp.is_float16_supported() is float16
    assert paddle.amp.is_bfloat16_supported() is bfloat16


@pytest.mark.parametrize(
    "device", ["xpu:0", "npu:0", paddle.MLUPlace(0), paddle.CustomPlace("gcu", 0)], ids=str
)
def test_a_missing_device_supports_nothing_and_does_not_warn(device):
    if device == "xpu:0" and torch.xpu.is_available():
        pytest.skip("there is an XPU")
    assert not paddle.amp.is_float16_supported(device)
    assert not paddle.amp.is_bfloat16_supported(device)


def test_an_unknown_device_raises():
    with pytest.raises(ValueError, match="The device must be a string such as 'cpu'"):
        paddle.amp.is_float16_supported("abacus")
