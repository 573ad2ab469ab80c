"""`paddle.device.cuda`: the GPUs of this machine and their memory, as torch reports them.

A device is a `CUDAPlace`, a number, a name such as `gpu:0`, or None for the current GPU. Without a
GPU there are none to count, and no memory is in use.
"""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._places import CUDAPlace, device_of
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS

__all__ = [
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "synchronize",
]


def device_count() -> int:
    """Return the number of GPUs.

    >>> device_count() == torch.cuda.device_count()
    True
    """
    return torch.cuda.device_count()


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return the compute capability of a GPU: (major, minor)."""
    return torch.cuda.get_device_capability(_gpu("get_device_capability", device))


def get_device_name(device: Any = None) -> str:
    """Return the product name of a GPU."""
    return torch.cuda.get_device_name(_gpu("get_device_name", device))


def get_device_properties(device: Any = None) -> Any:
    """Return the properties of a GPU, as torch has them."""
    return torch.cuda.get_device_properties(_gpu("get_device_properties", device))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of GPU memory that tensors take."""
    return _read_memory("memory_allocated", device)


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes of GPU memory that tensors have taken so far."""
    return _read_memory("max_memory_allocated", device)


def memory_reserved(device: Any = None) -> int:
    """Return the bytes of GPU memory that the allocator holds."""
    return _read_memory("memory_reserved", device)


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes of GPU memory that the allocator has held so far."""
    return _read_memory("max_memory_reserved", device)


def empty_cache() -> None:
    """Release the GPU memory that the allocator holds without using it."""
    torch.cuda.empty_cache()


def synchronize(device: Any = None) -> None:
    """Wait until a GPU has finished its work; without a GPU there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize(_gpu("synchronize", device))


def _read_memory(name: str, device: Any) -> int:
    if not torch.cuda.is_available():
        return 0
    value: int = getattr(torch.cuda, name)(_gpu(name, device))
    return value


def _gpu(function: str, device: Any) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError(
            f"paddle.device.cuda.{function}() needs a GPU, and there is none here. Test"
            " paddle.device.is_compiled_with_cuda() first."
        )
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    found = device_of(CUDAPlace(device) if isinstance(device, int) else device)
    if found.type != "cuda":
        raise ValueError(
            f"The device type {device!r} is not expected. Because paddle.device.cuda.{function}()"
            " only supports a CUDAPlace, an int or a str such as 'gpu:0'."
        )
    return found


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.cuda)
