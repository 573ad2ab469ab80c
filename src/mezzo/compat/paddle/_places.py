"""Paddle's places (`CPUPlace`, `CUDAPlace`, `XPUPlace`) and the default device (`set_device`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from mezzo import hardware

_TORCH_DEVICE_TYPES = {"gpu": "cuda"}
"""Paddle's device type → torch's, where the names differ."""

_default_device: torch.device | None = None
"""The device of the last `set_device`; None before the first call."""


@dataclass(frozen=True)
class Place:
    """A device. Paddle has an unrelated class per device type; these share one base class."""

    device: torch.device
    """The same device as torch names it."""

    def __repr__(self) -> str:
        return f"Place({_paddle_name(self.device)})"


class CPUPlace(Place):
    """`paddle.CPUPlace`: the CPU.

    >>> CPUPlace()
    Place(cpu)
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


class CUDAPlace(Place):
    """`paddle.CUDAPlace`: a GPU.

    >>> CUDAPlace(0).device
    device(type='cuda', index=0)
    """

    def __init__(self, id: int) -> None:
        super().__init__(torch.device("cuda", id))


class XPUPlace(Place):
    """`paddle.XPUPlace`: an XPU."""

    def __init__(self, id: int) -> None:
        super().__init__(torch.device("xpu", id))


def set_device(device: str) -> Place:
    """Set the device for new tensors and layers: torch's default device, by Paddle's name.

    >>> set_device("cpu")
    Place(cpu)
    """
    global _default_device
    chosen = device_of(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"The device should not be {device!r}, since there is no CUDA device here. Use"
            " set_device('cpu')."
        )
    if chosen != torch.get_default_device():
        torch.set_default_device(chosen)
    _default_device = chosen
    if chosen.type == "cpu":
        return CPUPlace()
    return CUDAPlace(chosen.index or 0) if chosen.type == "cuda" else Place(chosen)


def get_device() -> str:
    """Return the default device by Paddle's name.

    >>> from mezzo.compat import paddle
    >>> _ = paddle.set_device("cpu")
    >>> get_device()
    'cpu'
    """
    return _paddle_name(device_of(None))


def is_compiled_with_cuda() -> bool:
    """Return whether a GPU can be used.

    Paddle answers for its build. Programs use the answer to choose `CUDAPlace`, so here it is
    whether that place would work.
    """
    return torch.cuda.is_available()


def device_of(place: Any) -> torch.device:
    """Return torch's device for a place, a Paddle name (`gpu:0`) or a torch name.

    None is the device of `set_device`, or else the best device there is.

    >>> device_of("gpu:1")
    device(type='cuda', index=1)
    """
    if place is None:
        return _default_device or torch.device(hardware().device)
    if isinstance(place, Place):
        return place.device
    if isinstance(place, torch.device):
        return place
    if isinstance(place, str) and re.fullmatch(r"[a-z]+(:\d+)?", place):
        device_type, _, index = place.partition(":")
        device_type = _TORCH_DEVICE_TYPES.get(device_type, device_type)
        try:
            return torch.device(device_type, int(index)) if index else torch.device(device_type)
        except RuntimeError:
            # Not a device type of torch; the message below lists what is allowed.
            pass
    raise ValueError(
        "The device must be a string such as 'cpu', 'gpu', 'gpu:0' or 'xpu:0', a place or a"
        f" torch.device, but got {place!r}."
    )


def _paddle_name(device: torch.device) -> str:
    paddle_types = {torch_type: name for name, torch_type in _TORCH_DEVICE_TYPES.items()}
    device_type = paddle_types.get(device.type, device.type)
    return device_type if device_type == "cpu" else f"{device_type}:{device.index or 0}"
