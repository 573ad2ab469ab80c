"""Where a program runs, in Paddle's words: places, and the device that is set for all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from mezzo import hardware

_NAMES = {"gpu": "cuda"}
"""Paddle's names of device types, where torch has others."""


@dataclass(frozen=True)
class Place:
    """A device. Paddle has a class for each type; here they only differ in it."""

    device: torch.device
    """The same in torch's words."""

    def __repr__(self) -> str:
        return f"Place({_paddles(self.device)})"


class CPUPlace(Place):
    """The CPU.

    >>> CPUPlace()
    Place(cpu)
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


class CUDAPlace(Place):
    """A GPU.

    >>> CUDAPlace(0).device
    device(type='cuda', index=0)
    """

    def __init__(self, id: int) -> None:
        super().__init__(torch.device("cuda", id))


class XPUPlace(Place):
    """An XPU."""

    def __init__(self, id: int) -> None:
        super().__init__(torch.device("xpu", id))


def device_of(place: Any) -> torch.device:
    """The device that a place, a name of Paddle's (`gpu:0`) or of torch's means; None is the one that is set, or the best there is.

    >>> device_of("gpu:1")
    device(type='cuda', index=1)
    """
    if place is None:
        return _set or torch.device(hardware().device)
    if isinstance(place, Place):
        return place.device
    if isinstance(place, torch.device):
        return place
    if isinstance(place, str) and re.fullmatch(r"[a-z]+(:\d+)?", place):
        kind, _, index = place.partition(":")
        try:
            return (
                torch.device(_NAMES.get(kind, kind), int(index))
                if index
                else torch.device(_NAMES.get(kind, kind))
            )
        except RuntimeError:
            # torch does not know the type; the message below says which words there are.
            pass
    raise ValueError(
        "The device must be a string such as 'cpu', 'gpu', 'gpu:0' or 'xpu:0', a place or a"
        f" torch.device, but got {place!r}."
    )


def set_device(device: str) -> Place:
    """Set the device that new tensors and layers are made on: torch's default device, in Paddle's words.

    >>> set_device("cpu")
    Place(cpu)
    """
    global _set
    chosen = device_of(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"The device should not be {device!r}, since there is no CUDA device here. Use"
            " set_device('cpu')."
        )
    if chosen != torch.get_default_device():
        torch.set_default_device(chosen)
    _set = chosen
    if chosen.type == "cpu":
        return CPUPlace()
    return CUDAPlace(chosen.index or 0) if chosen.type == "cuda" else Place(chosen)


def get_device() -> str:
    """The device in Paddle's words.

    >>> from mezzo.compat import paddle
    >>> _ = paddle.set_device("cpu")
    >>> get_device()
    'cpu'
    """
    return _paddles(device_of(None))


def is_compiled_with_cuda() -> bool:
    """Whether a GPU can be used. Paddle asks its own build; what a program wants to know is whether `CUDAPlace` makes sense."""
    return torch.cuda.is_available()


def _paddles(device: torch.device) -> str:
    kind = next((name for name, torchs in _NAMES.items() if torchs == device.type), device.type)
    return kind if kind == "cpu" else f"{kind}:{device.index or 0}"


_set: torch.device | None = None
"""What `set_device` was last told."""
