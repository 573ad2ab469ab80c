"""`megengine.device`: the default device, which is the GPU where there is one.

Only what this dialect makes is placed there: tensors, layers and networks of the hub. torch's own
default device is not changed.
"""

from __future__ import annotations

import os
import re
import warnings

import torch

from mezzo._errors import UnsupportedError
from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS

__all__ = ["get_default_device", "get_device_count", "is_cuda_available", "set_default_device"]

_NAME = re.compile(r"([cxg]pu|rocm|multithread|cambricon|atlas)(x|\d+)(:\d+)?")
_CPU_KINDS = ("cpu", "multithread")

_default_name = os.environ.get("MGE_DEFAULT_DEVICE", "xpux")


def set_default_device(device: str = "xpux") -> None:
    """Choose where new tensors and layers are placed: 'xpux' (a GPU if there is one), 'gpu0', ….

    >>> set_default_device("cpu0")
    >>> get_default_device()
    'cpu0'
    >>> set_default_device("xpux")
    """
    global _default_name
    parse_device(device)
    _default_name = device


def get_default_device() -> str:
    """Return the name that was passed to `set_default_device`, or 'xpux'."""
    return _default_name


def default_device() -> torch.device:
    """Return the device of new tensors and layers."""
    return parse_device(_default_name)


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def get_device_count(device_type: str) -> int:
    """Return the number of devices of a type: 'gpu', 'cpu' or 'xpu'."""
    if device_type not in ("gpu", "cpu", "xpu"):
        raise AssertionError(f"device_type must be 'gpu', 'cpu' or 'xpu', got {device_type!r}.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus if device_type == "gpu" or (device_type == "xpu" and gpus) else 1


def parse_device(device: str | torch.device | None) -> torch.device:
    """Return the torch device of a MegEngine device name; None is the default device.

    Without a GPU, 'gpu0' is the CPU, with one warning per process.

    >>> parse_device("cpu0")
    device(type='cpu')
    """
    if device is None:
        return default_device()
    if isinstance(device, torch.device):
        return device
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise AssertionError(
            f"Invalid device name {device!r}. Use 'xpux', 'gpu0', 'gpux', 'cpu0' or 'cpux'."
        )
    kind, number = match[1], match[2]
    if kind in ("cambricon", "atlas"):
        raise UnsupportedError(f"There is no {kind} device here. Use 'gpu0', 'cpu0' or 'xpux'.")
    if kind in _CPU_KINDS:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if kind != "xpu":
            warn_once(
                "gpu",
                f"{device!r} is a GPU, and this machine has none that torch can use: the CPU is"
                " used instead.",
            )
        return torch.device("cpu")
    index = torch.cuda.current_device() if number == "x" else int(number)
    return torch.device("cuda", index)


_warned: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn about a topic once per process."""
    if topic not in _warned:
        _warned.add(topic)
        warnings.warn(message, UserWarning, stacklevel=4)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
