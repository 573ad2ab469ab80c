"""What a device can do, as a value that is passed around, faked in tests and shown to people."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name, parse_dtype


@dataclass(frozen=True)
class Support:
    """What a device does with one dtype."""

    supported: bool
    """Whether ops in this dtype run at all."""
    fast: bool
    """Whether the device has instructions that make it pay; a dtype that is emulated is supported and slow."""
    reason: str
    """Why, as a clause that can follow a colon."""

    @property
    def word(self) -> str:
        """The two flags in one word for tables: `native`, `slow` or `unsupported`."""
        if not self.supported:
            return "unsupported"
        return "native" if self.fast else "slow"


@dataclass(frozen=True)
class Choice:
    """The 16-bit dtype that `dtype="auto"` becomes on a device."""

    dtype: torch.dtype
    reason: str
    """Why this one, in a sentence."""


@dataclass(frozen=True)
class Hardware:
    """A device and the 16-bit dtypes it supports, computes natively, and why.

    >>> native = Support(supported=True, fast=True, reason="tensor cores compute it from compute capability 8.0")
    >>> gpu = Hardware("cuda", "NVIDIA H200", "9.0", float16=native, bfloat16=native)
    >>> gpu.best.dtype
    torch.bfloat16
    """

    device: str
    """The device type, as torch spells it: `cuda`, `cpu`, `xpu`."""
    name: str
    """What its maker calls it."""
    capability: str | None
    """The generation, in its maker's notation: `9.0`, `gfx90a`, `avx2`."""
    float16: Support
    bfloat16: Support

    def support(self, dtype: str | torch.dtype) -> Support:
        """What this device does with a 16-bit dtype, or with float32, which every device computes."""
        chosen = parse_dtype(dtype, allowed=(*HALF_DTYPES, torch.float32))
        if chosen == torch.float32:
            return Support(supported=True, fast=True, reason="every device computes float32")
        return self.float16 if chosen == torch.float16 else self.bfloat16

    @property
    def fast(self) -> tuple[torch.dtype, ...]:
        """The 16-bit dtypes that this device computes natively."""
        return tuple(dtype for dtype in HALF_DTYPES if self.support(dtype).fast)

    @property
    def best(self) -> Choice | None:
        """The 16-bit dtype to use when the user leaves the choice to the hardware, or None when none is supported.

        A native dtype comes before a slow one. Between equals bfloat16 wins: it has the range of float32, so that no loss scaling is needed.
        """
        # sorted() is stable: bfloat16 stands first and stays there between equals.
        for dtype in sorted((torch.bfloat16, torch.float16), key=lambda one: not self.support(one).fast):
            if self.support(dtype).supported:
                return Choice(dtype, self._why(dtype))
        return None

    def _why(self, dtype: torch.dtype) -> str:
        support, name = self.support(dtype), dtype_name(dtype)
        other = self.float16 if dtype == torch.bfloat16 else self.bfloat16
        if not support.fast:
            return f"{name} is slow on {self.name}: {support.reason}. Expect it to be slower than float32."
        if dtype == torch.float16:
            return f"{name} is native on {self.name} and bfloat16 is {other.word}; train with loss scaling, since {name} has a short range."
        beside = "float16 is native too, but " if other.fast else ""
        return f"{name} is native on {self.name}; {beside}{name} has the range of float32 and needs no loss scaling."

    def __str__(self) -> str:
        capability = f", {self.capability}" if self.capability else ""
        lines = [f"{self.name} ({self.device}{capability})"]
        for dtype in HALF_DTYPES:
            support = self.support(dtype)
            lines.append(f"  {dtype_name(dtype):9} {support.word:11}  {support.reason}")
        best = self.best
        lines.append(f"  {'auto':9} {dtype_name(best.dtype):11}  {best.reason}" if best else f"  {'auto':9} {'float32':11}  No 16-bit dtype is supported.")
        return "\n".join(lines)
