"""GPUs by name: peak rates, memory and bandwidth from the vendors' data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mezzo._errors import PolicyError
from mezzo._hardware.detect import Backend, DeviceFacts
from mezzo._hardware.support import Hardware, judge


@dataclass(frozen=True)
class Gpu:
    """A GPU model: dense peak rates in TFLOPS, as its data sheet lists them, without sparsity."""

    name: str
    capability: str
    """Compute capability, or AMD's architecture."""
    memory: float
    """Memory in GB."""
    bandwidth: float
    """Memory bandwidth in GB/s."""
    float32: float
    """TFLOPS of float32 without tensor cores."""
    tf32: float | None
    """TFLOPS of TF32 on tensor cores; None if it has none."""
    float16: float
    """TFLOPS of float16 on tensor cores."""
    bfloat16: float | None
    """TFLOPS of bfloat16 on tensor cores; None if it has none."""

    @property
    def hardware(self) -> Hardware:
        """Which 16-bit dtypes it supports."""
        backend = Backend.ROCM if self.capability.startswith("gfx") else Backend.CUDA
        return judge(DeviceFacts("cuda", self.name, backend, capability=self.capability))

    def rate(self, dtype: str) -> float:
        """Return the TFLOPS of products in `float32`, `tf32`, `float16` or `bfloat16`."""
        rates = {"tf32": self.tf32, "float16": self.float16, "bfloat16": self.bfloat16}
        return rates.get(dtype) or self.float32


_ROWS = (
    Gpu("P100", "6.0", 16, 732, 10.6, None, 21.2, None),
    Gpu("V100", "7.0", 32, 900, 15.7, None, 125, None),
    Gpu("T4", "7.5", 16, 320, 8.1, None, 65, None),
    Gpu("A10", "8.6", 24, 600, 31.2, 62.5, 125, 125),
    Gpu("A100", "8.0", 80, 2039, 19.5, 156, 312, 312),
    Gpu("RTX 3090", "8.6", 24, 936, 35.6, 35.6, 71, 71),
    Gpu("L4", "8.9", 24, 300, 30.3, 60, 121, 121),
    Gpu("L40S", "8.9", 48, 864, 91.6, 183, 362, 362),
    Gpu("RTX 4090", "8.9", 24, 1008, 82.6, 82.6, 165, 165),
    Gpu("H100", "9.0", 80, 3350, 67, 495, 989, 989),
    Gpu("H200", "9.0", 141, 4800, 67, 495, 989, 989),
    Gpu("B200", "10.0", 180, 8000, 75, 1100, 2250, 2250),
    Gpu("MI250X", "gfx90a", 128, 3277, 47.9, None, 383, 383),
    Gpu("MI300X", "gfx942", 192, 5300, 163.4, 654, 1307, 1307),
)
"""Dense rates of the SXM or OAM version where there are several. Sources: NVIDIA's data sheets of
P100, V100, T4, A10, A100, L4, L40S, H100, H200 and B200 and its white papers on Ampere (GA102) and
Ada; AMD's data sheets of MI250X and MI300X."""

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any spelling: `"h100"`, `"NVIDIA H100 80GB HBM3"`.

    >>> find_gpu("rtx4090").bandwidth
    1008
    """
    if not isinstance(name, str):
        raise PolicyError(f"gpu={name!r} should be a name: {', '.join(GPUS)}.")
    # The longest first: L40S contains L4.
    for gpu in sorted(_ROWS, key=lambda gpu: -len(gpu.name)):
        if re.search(_pattern(gpu.name), name, re.IGNORECASE):
            return gpu
    raise PolicyError(f"Unknown GPU {name!r}. Known are: {', '.join(GPUS)}.")


def _pattern(name: str) -> str:
    """Return what finds a name in any spelling, but not in a longer number: L4 is not L40."""
    return rf"{name.replace(' ', '[^a-z0-9]*')}(?![0-9])"
