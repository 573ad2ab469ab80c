"""What torch tells about a device, as plain data: written by the probe, read by the judge, faked in tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Backend(Enum):
    """The families whose abilities mezzo knows by itself, and the rest."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    """AMD GPUs, which torch also calls `cuda`."""
    XPU = "xpu"
    MPS = "mps"
    OTHER = "other"
    """NPU, MLU, HPU, MTIA and whatever comes: judged by what the back end says of itself."""


@dataclass(frozen=True)
class Facts:
    """What is known of one device before anything is concluded from it."""

    device: str
    """The device type, as torch spells it."""
    name: str
    """What its maker calls it."""
    backend: Backend
    capability: str | None = None
    """The generation, in its maker's notation: `9.0`, `gfx90a`, `avx2`."""
    absent: str | None = None
    """Why there is no such device here; None when there is one."""
    features: frozenset[str] = frozenset()
    """Abilities by name: instruction sets of a CPU, properties of an XPU, `macos14` for MPS."""
    autocast: bool = True
    """Whether torch has an autocast for this device type."""
    dtypes: frozenset[torch.dtype] | None = None
    """The dtypes that the back end lists as supported; None when it lists none."""
    bfloat16: bool | None = None
    """What the back end answers when asked for bfloat16; None when it cannot be asked."""
    native_bfloat16: bool | None = None
    """The same, emulation not counted; None when the back end draws no such line."""
