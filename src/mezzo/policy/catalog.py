"""The presets by name: torch's own lists, and those of the other systems."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mezzo._errors import PolicyError, unknown
from mezzo.policy import torch_lists
from mezzo.policy.preset import OpLists
from mezzo.policy.presets import PRESETS
from mezzo.policy.rule import Level

_TORCH: Mapping[str, str | None] = {"torch": None, "torch-cuda": "cuda", "torch-cpu": "cpu"}

NAMES: tuple[str, ...] = (*_TORCH, *PRESETS)
"""Every preset: `torch` is the device's own lists, `torch-cuda` and `torch-cpu` choose one wherever they run."""


def parse(word: str) -> str:
    """Read a preset's name."""
    if word in NAMES:
        return word
    raise PolicyError(unknown("preset", word, NAMES))


def check(preset: str, level: Level) -> None:
    """Refuse a level that the preset's system does not have."""
    op_lists(preset, level, torch.float16, "cpu")


def op_lists(preset: str, level: Level, dtype: torch.dtype, device: str) -> OpLists:
    """The lists of a preset at a level, for a dtype and a device."""
    if preset in _TORCH or level is Level.O0:
        return torch_lists.lists(level, _TORCH.get(preset) or device)
    return PRESETS[preset].lists(level, dtype)
