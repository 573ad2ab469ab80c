"""From the facts about a device to what it can do: pure functions, one for each family of devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from mezzo._dtypes import dtype_name
from mezzo._hardware.facts import Backend, Facts
from mezzo._hardware.value import Hardware, Support


def judge(facts: Facts) -> Hardware:
    """Say what a device can do with the 16-bit dtypes, and why."""
    if facts.absent is not None:
        float16 = bfloat16 = _no(facts.absent)
    else:
        float16, bfloat16 = _JUDGES[facts.backend](facts)
    return Hardware(facts.device, facts.name, facts.capability, float16=float16, bfloat16=bfloat16)


def _native(reason: str) -> Support:
    return Support(supported=True, fast=True, reason=reason)


def _slow(reason: str) -> Support:
    return Support(supported=True, fast=False, reason=reason)


def _no(reason: str) -> Support:
    return Support(supported=False, fast=False, reason=reason)


def _judge_cuda(facts: Facts) -> tuple[Support, Support]:
    have = _version(facts.capability)
    shown = f"compute capability {facts.capability}"
    if have >= (7, 0):
        float16 = _native(f"tensor cores compute it from compute capability 7.0, this is {facts.capability}")
    elif have >= (5, 3):
        float16 = _slow(f"{shown} has float16 arithmetic but no tensor cores, which come with 7.0")
    else:
        float16 = _no(f"float16 arithmetic comes with compute capability 5.3, this is {facts.capability}")
    if have >= (8, 0):
        return float16, _native(f"tensor cores compute it from compute capability 8.0, this is {facts.capability}")
    return float16, _slow(f"{shown} computes it through float32, native bfloat16 comes with 8.0")


_ROCM_MATRIX_CORES = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""CDNA (MFMA) and RDNA 3 onward (WMMA): both 16-bit dtypes have matrix instructions.

https://rocm.docs.amd.com/en/latest/reference/precision-support.html
"""

_ROCM_PACKED_MATH = ("gfx90", "gfx10")
"""Vega and RDNA 1 and 2: two float16 operations in the place of one float32, nothing for bfloat16."""


def _judge_rocm(facts: Facts) -> tuple[Support, Support]:
    architecture = facts.capability or "an unnamed architecture"
    if architecture.startswith(_ROCM_MATRIX_CORES):
        both = _native(f"{architecture} has matrix instructions for it")
        return both, both
    bfloat16 = _slow(f"{architecture} has no bfloat16 instructions and computes it through float32")
    if architecture.startswith(_ROCM_PACKED_MATH):
        return _native(f"{architecture} packs two float16 operations in the place of one float32"), bfloat16
    return _slow(f"{architecture} computes float16 no faster than float32"), bfloat16


def _judge_xpu(facts: Facts) -> tuple[Support, Support]:
    if "has_fp16" in facts.features:
        float16 = _native("the device reports float16 arithmetic")
    else:
        float16 = _no("the device reports no float16 arithmetic")
    if "has_bfloat16_conversions" in facts.features:
        return float16, _native("the device reports bfloat16 conversions")
    return float16, _slow("the device reports no bfloat16 conversions, so it is computed through float32")


_FIRST_APPLE_CHIP_WITH_BFLOAT16 = 3


def _judge_mps(facts: Facts) -> tuple[Support, Support]:
    float16 = _native("Metal computes float16 on every GPU")
    if "macos14" not in facts.features:
        return float16, _no("bfloat16 on MPS needs macOS 14")
    generation = re.match(r"Apple M(\d+)", facts.name)
    if generation is None:
        # https://github.com/pytorch/pytorch/issues/141864: the Radeon GPUs of Intel Macs refuse it.
        return float16, _no(f"bfloat16 on MPS needs an Apple GPU, this is {facts.name}")
    if int(generation[1]) >= _FIRST_APPLE_CHIP_WITH_BFLOAT16:
        return float16, _native("Apple GPUs have bfloat16 instructions from the M3 on")
    return float16, _slow(f"{facts.name} computes bfloat16 through float32, native bfloat16 comes with the M3")


_X86: Mapping[torch.dtype, Mapping[str, str]] = {
    torch.float16: {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512-FP16"},
    torch.bfloat16: {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"},
}
"""Which instruction sets compute a dtype natively, widest first: the name in `torch.cpu.get_capabilities` and the maker's."""

_ARM: Mapping[torch.dtype, Mapping[str, str]] = {
    torch.float16: {"fp16_arith": "float16 arithmetic (FEAT_FP16)"},
    torch.bfloat16: {"sve_bf16": "SVE bfloat16", "bf16": "bfloat16 (FEAT_BF16)"},
}


def _judge_cpu(facts: Facts) -> tuple[Support, Support]:
    # Every 64-bit Arm has NEON, and nothing else does.
    known = _ARM if "neon" in facts.features else _X86
    return _judge_instructions(facts, known[torch.float16]), _judge_instructions(facts, known[torch.bfloat16])


def _judge_instructions(facts: Facts, known: Mapping[str, str]) -> Support:
    for feature, name in known.items():
        if feature in facts.features:
            return _native(f"this CPU has {name} instructions")
    return _slow(f"this CPU has no {' or '.join(known.values())} instructions, so torch emulates it in software")


def _judge_other(facts: Facts) -> tuple[Support, Support]:
    if not facts.autocast:
        unsupported = _no(f"torch has no autocast for {facts.device!r} devices")
        return unsupported, unsupported
    return _judge_listed(facts, torch.float16), _judge_answer(facts)


def _judge_answer(facts: Facts) -> Support:
    """Trust what the back end answers about bfloat16 before what it lists."""
    if facts.bfloat16 is None:
        return _judge_listed(facts, torch.bfloat16)
    if not facts.bfloat16:
        return _no(f"the {facts.device} back end says that it lacks bfloat16")
    if facts.native_bfloat16 is False:
        return _slow(f"the {facts.device} back end says that it emulates bfloat16")
    return _native(f"the {facts.device} back end says that it supports bfloat16")


def _judge_listed(facts: Facts, dtype: torch.dtype) -> Support:
    """Trust what the back end lists; silence counts as yes, since torch has an autocast for it."""
    name = dtype_name(dtype)
    if facts.dtypes is None:
        return _native(f"torch has an autocast for {facts.device!r} devices, and the back end does not list its dtypes")
    if dtype in facts.dtypes:
        return _native(f"the {facts.device} back end lists {name} as supported")
    return _no(f"the {facts.device} back end does not list {name} as supported")


def _version(capability: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (capability or "0.0").split("."))


_JUDGES: Mapping[Backend, Callable[[Facts], tuple[Support, Support]]] = {
    Backend.CPU: _judge_cpu,
    Backend.CUDA: _judge_cuda,
    Backend.ROCM: _judge_rocm,
    Backend.XPU: _judge_xpu,
    Backend.MPS: _judge_mps,
    Backend.OTHER: _judge_other,
}
