"""The op lists of other systems, as data: one module a system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from mezzo.policy.preset import OpLists, OpNames
from mezzo.policy.presets import apex, megengine, mxnet, oneflow, paddle
from mezzo.policy.rule import Level


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


PRESETS: Mapping[str, Preset] = {"paddle": paddle, "oneflow": oneflow, "megengine": megengine, "mxnet": mxnet, "apex": apex}
"""Every system but torch, by name."""
