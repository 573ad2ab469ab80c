"""Copies that a device makes on its own time: the host starts one, goes on, and looks later whether it has arrived."""

from __future__ import annotations

import torch


def waits(device: torch.device) -> bool:
    """Whether reading a tensor of this device makes the host wait for work that is still under way."""
    return device.type != "cpu"


def capturing(device: torch.device) -> bool:
    """Whether work for this device is being captured: it does not run now, but at every replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Copy:
    """One copy under way to the host."""

    __slots__ = ("_arrived", "_values")

    def __init__(self, source: torch.Tensor) -> None:
        self._arrived: torch.Event | None = None
        if source.device.type == "cpu":
            self._values = source.clone()
            return
        self._values = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._values.copy_(source, non_blocking=True)
        self._arrived = torch.Event(device=source.device)
        self._arrived.record()

    def arrived(self) -> bool:
        """Whether the values are here; this does not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def values(self) -> list[float]:
        """The values. Only what has arrived may be asked."""
        listed: list[float] = self._values.tolist()
        return listed
