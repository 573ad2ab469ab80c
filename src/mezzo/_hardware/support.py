"""Decide which 16-bit dtypes a device supports, and which of them it computes natively."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name, parse_dtype
from mezzo._hardware.detect import Backend, DeviceFacts


@dataclass(frozen=True)
class Support:
    """Support of a device for one dtype."""

    supported: bool
    """Whether ops in this dtype run."""
    native: bool
    """Whether the device has instructions for it. An emulated dtype is supported, and slow."""
    reason: str
    """The reason, as a clause that can follow a colon."""

    @property
    def label(self) -> str:
        """`native`, `slow` or `unsupported`, for tables."""
        if not self.supported:
            return "unsupported"
        return "native" if self.native else "slow"


@dataclass(frozen=True)
class DtypeChoice:
    """The 16-bit dtype that `dtype="auto"` means on a device."""

    dtype: torch.dtype
    reason: str
    """The reason, as a sentence."""


@dataclass(frozen=True)
class Hardware:
    """A device, and its support for the 16-bit dtypes.

    `hardware()` returns it for a device of this machine; a test can make any other.

    >>> native = Support(supported=True, native=True, reason="it has tensor cores")
    >>> gpu = Hardware("cuda", "NVIDIA H200", "9.0", float16=native, bfloat16=native)
    >>> gpu.preferred.dtype
    torch.bfloat16
    """

    device: str
    """The device type, as torch spells it: `cuda`, `cpu`, `xpu`."""
    name: str
    """The product name."""
    capability: str | None
    """The generation, in the vendor's notation: `9.0`, `gfx90a`, `avx2`."""
    float16: Support
    """Support for float16."""
    bfloat16: Support
    """Support for bfloat16."""
    absent: str | None = None
    """Why this machine has no such device; None if it has one."""

    def support(self, dtype: str | torch.dtype) -> Support:
        """Return the support for a 16-bit dtype, or for float32, which every device has."""
        chosen = parse_dtype(dtype, allowed=(*HALF_DTYPES, torch.float32))
        if chosen == torch.float32:
            return Support(supported=True, native=True, reason="every device computes float32")
        return self.float16 if chosen == torch.float16 else self.bfloat16

    @property
    def native_dtypes(self) -> tuple[torch.dtype, ...]:
        """The 16-bit dtypes that this device computes natively."""
        return tuple(dtype for dtype in HALF_DTYPES if self.support(dtype).native)

    @property
    def preferred(self) -> DtypeChoice | None:
        """The 16-bit dtype that `dtype="auto"` means here; None if no 16-bit dtype is supported.

        A native dtype is preferred to a slow one. If both are equal, bfloat16 is: it has the range
        of float32 and needs no loss scaling.
        """
        # sorted() is stable: bfloat16 stays first if both are equal.
        for dtype in sorted(
            (torch.bfloat16, torch.float16), key=lambda dtype: not self.support(dtype).native
        ):
            if self.support(dtype).supported:
                return DtypeChoice(dtype, self._reason(dtype))
        return None

    def _reason(self, dtype: torch.dtype) -> str:
        support, name = self.support(dtype), dtype_name(dtype)
        other = self.float16 if dtype == torch.bfloat16 else self.bfloat16
        if not support.native:
            return (
                f"{name} is slow on {self.name}: {support.reason}. Expect it to be slower than"
                " float32."
            )
        if dtype == torch.float16:
            return (
                f"{name} is native on {self.name} and bfloat16 is {other.label}; train with loss"
                f" scaling, since {name} has a short range."
            )
        comparison = "float16 is native too, but " if other.native else ""
        return (
            f"{name} is native on {self.name}; {comparison}{name} has the range of float32 and"
            " needs no loss scaling."
        )

    def __str__(self) -> str:
        capability = f", {self.capability}" if self.capability else ""
        lines = [f"{self.name} ({self.device}{capability})"]
        for dtype in HALF_DTYPES:
            support = self.support(dtype)
            lines.append(f"  {dtype_name(dtype):9} {support.label:11}  {support.reason}")
        choice = self.preferred
        lines.append(
            f"  {'auto':9} {dtype_name(choice.dtype):11}  {choice.reason}"
            if choice
            else f"  {'auto':9} {'float32':11}  No 16-bit dtype is supported."
        )
        return "\n".join(lines)


def judge(facts: DeviceFacts) -> Hardware:
    """Decide what a device supports from what torch reports about it."""
    if facts.absent is not None:
        float16 = bfloat16 = _unsupported(facts.absent)
    else:
        float16, bfloat16 = _JUDGES[facts.backend](facts)
    return Hardware(
        facts.device,
        facts.name,
        facts.capability,
        float16=float16,
        bfloat16=bfloat16,
        absent=facts.absent,
    )


def _native(reason: str) -> Support:
    return Support(supported=True, native=True, reason=reason)


def _slow(reason: str) -> Support:
    return Support(supported=True, native=False, reason=reason)


def _unsupported(reason: str) -> Support:
    return Support(supported=False, native=False, reason=reason)


def _judge_cuda(facts: DeviceFacts) -> tuple[Support, Support]:
    have = _version(facts.capability)
    shown = f"compute capability {facts.capability}"
    if have >= (7, 0):
        float16 = _native(
            f"tensor cores compute it from compute capability 7.0, this is {facts.capability}"
        )
    elif have >= (5, 3):
        float16 = _slow(f"{shown} has float16 arithmetic but no tensor cores, which come with 7.0")
    else:
        float16 = _unsupported(
            f"float16 arithmetic comes with compute capability 5.3, this is {facts.capability}"
        )
    if have >= (8, 0):
        return float16, _native(
            f"tensor cores compute it from compute capability 8.0, this is {facts.capability}"
        )
    return float16, _slow(f"{shown} computes it through float32, native bfloat16 comes with 8.0")


_ROCM_MATRIX_CORES = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""CDNA (MFMA) and RDNA 3 onward (WMMA): both 16-bit dtypes have matrix instructions.

https://rocm.docs.amd.com/en/latest/reference/precision-support.html
"""

_ROCM_PACKED_MATH = ("gfx90", "gfx10")
"""Vega and RDNA 1 and 2: two float16 operations in the place of one float32, nothing for
bfloat16."""


def _judge_rocm(facts: DeviceFacts) -> tuple[Support, Support]:
    architecture = facts.capability or "an unnamed architecture"
    if architecture.startswith(_ROCM_MATRIX_CORES):
        both = _native(f"{architecture} has matrix instructions for it")
        return both, both
    bfloat16 = _slow(f"{architecture} has no bfloat16 instructions and computes it through float32")
    if architecture.startswith(_ROCM_PACKED_MATH):
        return (
            _native(f"{architecture} packs two float16 operations in the place of one float32"),
            bfloat16,
        )
    return _slow(f"{architecture} computes float16 no faster than float32"), bfloat16


def _judge_xpu(facts: DeviceFacts) -> tuple[Support, Support]:
    if "has_fp16" in facts.features:
        float16 = _native("the device reports float16 arithmetic")
    else:
        float16 = _unsupported("the device reports no float16 arithmetic")
    if "has_bfloat16_conversions" in facts.features:
        return float16, _native("the device reports bfloat16 conversions")
    return float16, _slow(
        "the device reports no bfloat16 conversions, so it is computed through float32"
    )


_FIRST_APPLE_CHIP_WITH_BFLOAT16 = 3


def _judge_mps(facts: DeviceFacts) -> tuple[Support, Support]:
    float16 = _native("Metal computes float16 on every GPU")
    if "macos14" not in facts.features:
        return float16, _unsupported("bfloat16 on MPS needs macOS 14")
    generation = re.match(r"Apple M(\d+)", facts.name)
    if generation is None:
        # The Radeon GPUs of Intel Macs have none: https://github.com/pytorch/pytorch/issues/141864
        return float16, _unsupported(f"bfloat16 on MPS needs an Apple GPU, this is {facts.name}")
    if int(generation[1]) >= _FIRST_APPLE_CHIP_WITH_BFLOAT16:
        return float16, _native("Apple GPUs have bfloat16 instructions from the M3 on")
    return float16, _slow(
        f"{facts.name} computes bfloat16 through float32, native bfloat16 comes with the M3"
    )


_X86: Mapping[torch.dtype, Mapping[str, str]] = {
    torch.float16: {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512-FP16"},
    torch.bfloat16: {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"},
}
"""Instruction sets that compute a dtype natively, widest first: the name in
`torch.cpu.get_capabilities`, and the vendor's."""

_ARM: Mapping[torch.dtype, Mapping[str, str]] = {
    torch.float16: {"fp16_arith": "float16 arithmetic (FEAT_FP16)"},
    torch.bfloat16: {"sve_bf16": "SVE bfloat16", "bf16": "bfloat16 (FEAT_BF16)"},
}


def _judge_cpu(facts: DeviceFacts) -> tuple[Support, Support]:
    # Every 64-bit Arm has NEON, and nothing else does.
    known = _ARM if "neon" in facts.features else _X86
    return _judge_instructions(facts, known[torch.float16]), _judge_instructions(
        facts, known[torch.bfloat16]
    )


def _judge_instructions(facts: DeviceFacts, known: Mapping[str, str]) -> Support:
    for feature, name in known.items():
        if feature in facts.features:
            return _native(f"this CPU has {name} instructions")
    return _slow(
        f"this CPU has no {' or '.join(known.values())} instructions, so torch emulates it in"
        " software"
    )


def _judge_other(facts: DeviceFacts) -> tuple[Support, Support]:
    if not facts.autocast:
        neither = _unsupported(f"torch has no autocast for {facts.device!r} devices")
        return neither, neither
    return _judge_listed(facts, torch.float16), _judge_bfloat16(facts)


def _judge_bfloat16(facts: DeviceFacts) -> Support:
    """Prefer the back end's query for bfloat16 to its list of dtypes."""
    if facts.bfloat16 is None:
        return _judge_listed(facts, torch.bfloat16)
    if not facts.bfloat16:
        return _unsupported(f"the {facts.device} back end reports no bfloat16 support")
    if facts.native_bfloat16 is False:
        return _slow(f"the {facts.device} back end reports that it emulates bfloat16")
    return _native(f"the {facts.device} back end reports bfloat16 support")


def _judge_listed(facts: DeviceFacts, dtype: torch.dtype) -> Support:
    """Use the back end's list of dtypes; without one assume support, since torch has autocast."""
    name = dtype_name(dtype)
    if facts.dtypes is None:
        return _native(
            f"torch has an autocast for {facts.device!r} devices, and the back end does not list"
            " its dtypes"
        )
    if dtype in facts.dtypes:
        return _native(f"the {facts.device} back end lists {name} as supported")
    return _unsupported(f"the {facts.device} back end does not list {name} as supported")


def _version(capability: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (capability or "0.0").split("."))


_JUDGES: Mapping[Backend, Callable[[DeviceFacts], tuple[Support, Support]]] = {
    Backend.CPU: _judge_cpu,
    Backend.CUDA: _judge_cuda,
    Backend.ROCM: _judge_rocm,
    Backend.XPU: _judge_xpu,
    Backend.MPS: _judge_mps,
    Backend.OTHER: _judge_other,
}
