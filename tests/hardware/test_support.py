"""What a device supports, decided from facts; no device is needed."""

import pytest
import torch

from mezzo._hardware.detect import Backend, DeviceFacts
from mezzo._hardware.support import judge


def labels(facts):
    found = judge(facts)
    return found.float16.label, found.bfloat16.label


def cuda(capability):
    return DeviceFacts("cuda", "NVIDIA GPU", Backend.CUDA, capability=capability)


def cpu(*features):
    return DeviceFacts("cpu", "CPU", Backend.CPU, capability="avx2", features=frozenset(features))


def npu(**facts):
    return DeviceFacts("npu", "Ascend910B", Backend.OTHER, **facts)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("5.2", ("unsupported", "slow")),
        ("5.3", ("slow", "slow")),
        ("6.1", ("slow", "slow")),
        ("7.0", ("native", "slow")),
        ("7.5", ("native", "slow")),
        ("8.0", ("native", "native")),
        ("9.0", ("native", "native")),
        ("10.0", ("native", "native")),
        ("12.1", ("native", "native")),
        (None, ("unsupported", "slow")),
    ],
)
def test_cuda_is_judged_by_compute_capability(capability, expected):
    assert labels(cuda(capability)) == expected


@pytest.mark.parametrize("capability", ["5.2", "6.1", "7.5", "9.0"])
def test_every_reason_on_cuda_names_the_compute_capability(capability):
    found = judge(cuda(capability))
    assert capability in found.float16.reason
    assert capability in found.bfloat16.reason


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("gfx803", ("slow", "slow")),
        ("gfx900", ("native", "slow")),
        ("gfx906", ("native", "slow")),
        ("gfx1030", ("native", "slow")),
        ("gfx908", ("native", "native")),
        ("gfx90a", ("native", "native")),
        ("gfx942", ("native", "native")),
        ("gfx950", ("native", "native")),
        ("gfx1100", ("native", "native")),
        ("gfx1201", ("native", "native")),
        (None, ("slow", "slow")),
    ],
)
def test_rocm_is_judged_by_architecture(architecture, expected):
    assert labels(DeviceFacts("cuda", "AMD GPU", Backend.ROCM, capability=architecture)) == expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"has_fp16", "has_bfloat16_conversions"}, ("native", "native")),
        ({"has_fp16"}, ("native", "slow")),
        (set(), ("unsupported", "slow")),
    ],
)
def test_xpu_is_judged_by_its_properties(features, expected):
    assert (
        labels(DeviceFacts("xpu", "Intel GPU", Backend.XPU, features=frozenset(features)))
        == expected
    )


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("Apple M1 Pro", {"macos14"}, ("native", "slow")),
        ("Apple M2", {"macos14"}, ("native", "slow")),
        ("Apple M3 Max", {"macos14"}, ("native", "native")),
        ("Apple M10", {"macos14"}, ("native", "native")),
        ("Apple M3", set(), ("native", "unsupported")),
        ("AMD Radeon Pro Vega 56", {"macos14"}, ("native", "unsupported")),
    ],
)
def test_mps_is_judged_by_chip_and_system(name, features, expected):
    assert labels(DeviceFacts("mps", name, Backend.MPS, features=frozenset(features))) == expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), ("slow", "slow")),
        (("avx2", "f16c", "fma3"), ("slow", "slow")),
        (("avx512_f", "avx512_vnni"), ("slow", "slow")),
        (("avx512_f", "avx512_bf16"), ("slow", "native")),
        (("avx512_bf16", "amx_tile", "amx_bf16"), ("slow", "native")),
        (("avx512_bf16", "avx512_fp16"), ("native", "native")),
        (("amx_bf16", "amx_fp16"), ("native", "native")),
        (("neon",), ("slow", "slow")),
        (("neon", "fp16_arith"), ("native", "slow")),
        (("neon", "fp16_arith", "bf16"), ("native", "native")),
        (("neon", "sve_bf16"), ("slow", "native")),
    ],
)
def test_a_cpu_is_judged_by_its_instructions(features, expected):
    assert labels(cpu(*features)) == expected


def test_reasons_on_a_cpu_name_the_instructions_it_has_or_lacks():
    found = judge(cpu("avx512_bf16", "amx_bf16"))
    assert found.bfloat16.reason == "this CPU has AMX-BF16 instructions"
    assert (
        found.float16.reason
        == "this CPU has no AMX-FP16 or AVX512-FP16 instructions, so torch emulates it in software"
    )
    assert "FEAT_BF16" in judge(cpu("neon")).bfloat16.reason


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"autocast": False}, ("unsupported", "unsupported")),
        ({}, ("native", "native")),
        ({"dtypes": frozenset({torch.float16, torch.bfloat16})}, ("native", "native")),
        ({"dtypes": frozenset({torch.float16})}, ("native", "unsupported")),
        ({"dtypes": frozenset()}, ("unsupported", "unsupported")),
        ({"bfloat16": False}, ("native", "unsupported")),
        ({"bfloat16": True}, ("native", "native")),
        ({"bfloat16": True, "native_bfloat16": False}, ("native", "slow")),
        (
            {"bfloat16": True, "native_bfloat16": True, "dtypes": frozenset({torch.float16})},
            ("native", "native"),
        ),
    ],
)
def test_another_back_end_is_judged_by_what_it_reports(facts, expected):
    assert labels(npu(**facts)) == expected


def test_reasons_name_the_back_end():
    assert (
        judge(npu(bfloat16=False)).bfloat16.reason == "the npu back end reports no bfloat16 support"
    )
    assert judge(npu(autocast=False)).float16.reason == "torch has no autocast for 'npu' devices"


@pytest.mark.parametrize("backend", list(Backend))
def test_an_absent_device_supports_nothing_with_the_reason(backend):
    found = judge(
        DeviceFacts("cuda", "no CUDA device", backend, absent="no CUDA device is visible")
    )
    assert found.float16 == found.bfloat16
    assert (found.float16.label, found.float16.reason) == (
        "unsupported",
        "no CUDA device is visible",
    )


@pytest.mark.parametrize("backend", list(Backend))
def test_device_name_and_capability_are_those_of_the_facts(backend):
    found = judge(DeviceFacts("kind", "Name", backend, capability="1.0"))
    assert (found.device, found.name, found.capability) == ("kind", "Name", "1.0")
    assert found.float16.reason
    assert found.bfloat16.reason
