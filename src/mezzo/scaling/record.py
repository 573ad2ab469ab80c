"""What a scaler knows of one optimizer between two updates."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mezzo.scaling.culprit import NOBODY, Culprit
from mezzo.scaling.gradients import Flags
from mezzo.scaling.words import Stage


@dataclass(slots=True)
class Record:
    """The stage of an optimizer and the flags found in its gradients, for each loss."""

    stage: Stage = Stage.READY
    """What was done with the optimizer so far."""
    found: dict[int, Flags] = field(default_factory=dict)
    """Index of the loss → flags."""
    told: list[bool | None] = field(default_factory=list)
    """What each check told the host: whether a gradient was not finite, or None where only the flags know."""
    culprit: Culprit = NOBODY
    """Who can name the first bad parameter."""

    @property
    def bad(self) -> bool | None:
        """Whether a gradient was not finite, where the host knows without waiting."""
        return None if not self.told or None in self.told else True in self.told

    def flags(self, index: int) -> Flags:
        """The flags of one loss, to be raised."""
        flags = self.found.get(index)
        if flags is None:
            flags = self.found[index] = {}
        return flags

    def all_flags(self) -> list[torch.Tensor]:
        """Every flag that was recorded."""
        return [flag for flags in self.found.values() for flag in flags.values()]


def combine(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flag for several, on one device; nothing is read unless that device is the CPU and a flag comes from elsewhere."""
    if len(flags) == 1 and flags[0].device == device:
        return flags[0]
    # A copy to the CPU that does not block could be looked at before it has arrived.
    moved = [flag.reshape(()).to(device, non_blocking=device.type != "cpu") for flag in flags]
    return torch.stack(moved).amax(0) if len(moved) > 1 else moved[0]


def meeting_place(flags: list[torch.Tensor]) -> torch.device:
    """Where flags are combined to be read once: where the first is that is not on a CPU."""
    return next((flag.device for flag in flags if flag.device.type != "cpu"), flags[0].device)
