"""Presets: the op lists of torch and of other systems, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from mezzo._errors import PolicyError, unknown
from mezzo.policy.presets import apex, megengine, mxnet, oneflow, paddle, torch_amp
from mezzo.policy.types import Level, OpLists, OpNames


class Preset(Protocol):
    """What each module of another system defines."""

    @property
    def NAMES(self) -> OpNames:  # noqa: N802 - a constant of the module
        """Translation of the system's op names."""

    @property
    def LEVELS(self) -> tuple[Level, ...]:  # noqa: N802 - a constant of the module
        """The levels of the system except O0."""

    def lists(self, level: Level, dtype: torch.dtype) -> OpLists:
        """Return the op lists of a level and a 16-bit dtype; raise for an unknown level."""


PRESETS: Mapping[str, Preset] = {
    "paddle": paddle,
    "oneflow": oneflow,
    "megengine": megengine,
    "mxnet": mxnet,
    "apex": apex,
}
"""The systems other than torch, by name."""


_TORCH: Mapping[str, str | None] = {"torch": None, "torch-cuda": "cuda", "torch-cpu": "cpu"}

NAMES: tuple[str, ...] = (*_TORCH, *PRESETS)
"""All presets. `torch` has the lists of the device; `torch-cuda` and `torch-cpu` have those of one
device on all devices."""


def parse_preset(name: str) -> str:
    """Return the name of a preset; raise `PolicyError` if it is unknown."""
    if name in NAMES:
        return name
    raise PolicyError(unknown("preset", name, NAMES))


def is_torch(preset: str) -> bool:
    """Return whether a preset has torch's lists, and not those of another system."""
    return preset in _TORCH


def check_preset(preset: str, level: Level) -> None:
    """Raise `PolicyError` if the preset does not have the level."""
    preset_lists(preset, level, torch.float16, "cpu")


def preset_lists(preset: str, level: Level, dtype: torch.dtype, device: str) -> OpLists:
    """Return the op lists of a preset at a level, for a dtype and a device."""
    if preset in _TORCH or level is Level.O0:
        return torch_amp.level_lists(level, _TORCH.get(preset) or device)
    return PRESETS[preset].lists(level, dtype)
