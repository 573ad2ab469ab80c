"""Op lists by name: those of torch and of the systems whose dialects mezzo speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from mezzo._errors import PolicyError, unknown
from mezzo.policy.presets import apex, megengine, mxnet, oneflow, paddle, torch_amp
from mezzo.policy.types import Level, OpLists, OpNames


class Preset(Protocol):
    """What each module offers."""

    @property
    def NAMES(self) -> OpNames:  # noqa: N802 - a constant of the module
        """How the system's op names translate."""

    @property
    def LEVELS(self) -> tuple[Level, ...]:  # noqa: N802 - a constant of the module
        """The levels it has beside O0."""

    def lists(self, level: Level, dtype: torch.dtype) -> OpLists:
        """Its op lists at a level, for a 16-bit dtype; a level it does not have is refused."""


PRESETS: Mapping[str, Preset] = {
    "paddle": paddle,
    "oneflow": oneflow,
    "megengine": megengine,
    "mxnet": mxnet,
    "apex": apex,
}
"""Every system but torch, by name."""


_TORCH: Mapping[str, str | None] = {"torch": None, "torch-cuda": "cuda", "torch-cpu": "cpu"}

NAMES: tuple[str, ...] = (*_TORCH, *PRESETS)
"""Every preset: `torch` is the device's own lists, `torch-cuda` and `torch-cpu` choose one
wherever they run."""


def parse_preset(word: str) -> str:
    """Read a preset's name."""
    if word in NAMES:
        return word
    raise PolicyError(unknown("preset", word, NAMES))


def check_preset(preset: str, level: Level) -> None:
    """Refuse a level that the preset's system does not have."""
    preset_lists(preset, level, torch.float16, "cpu")


def preset_lists(preset: str, level: Level, dtype: torch.dtype, device: str) -> OpLists:
    """The lists of a preset at a level, for a dtype and a device."""
    if preset in _TORCH or level is Level.O0:
        return torch_amp.level_lists(level, _TORCH.get(preset) or device)
    return PRESETS[preset].lists(level, dtype)
