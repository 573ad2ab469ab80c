"""`paddle.device`: the default place, and what this machine has.

Paddle's `is_compiled_with_*` answer for its build. Programs use the answers to choose a place, so
here they are whether that place would be used.
"""

from __future__ import annotations

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._places import (
    CPUPlace,
    CUDAPinnedPlace,
    CUDAPlace,
    CustomPlace,
    IPUPlace,
    MLUPlace,
    NPUPlace,
    XPUPlace,
    device_count,
    device_of,
    get_device,
    set_device,
)
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.device import cuda

__all__ = [
    "CPUPlace",
    "CUDAPinnedPlace",
    "CUDAPlace",
    "CustomPlace",
    "IPUPlace",
    "MLUPlace",
    "NPUPlace",
    "XPUPlace",
    "cuda",
    "device_count",
    "get_all_custom_device_type",
    "get_all_device_type",
    "get_available_custom_device",
    "get_available_device",
    "get_cudnn_version",
    "get_device",
    "is_compiled_with_cinn",
    "is_compiled_with_cuda",
    "is_compiled_with_custom_device",
    "is_compiled_with_distribute",
    "is_compiled_with_ipu",
    "is_compiled_with_mlu",
    "is_compiled_with_npu",
    "is_compiled_with_rocm",
    "is_compiled_with_xpu",
    "set_device",
    "synchronize",
]

_CUSTOM_TYPES = ("npu", "mlu")
"""Device types that Paddle gets from plug-ins, and torch from other packages."""


def is_compiled_with_cuda() -> bool:
    """Return whether a GPU can be used.

    >>> is_compiled_with_cuda() == torch.cuda.is_available()
    True
    """
    return torch.cuda.is_available()


def is_compiled_with_rocm() -> bool:
    """Return whether the GPUs are AMD's."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_compiled_with_xpu() -> bool:
    """Return whether an XPU can be used."""
    return device_count("xpu") > 0


def is_compiled_with_npu() -> bool:
    """Return whether an NPU can be used."""
    return device_count("npu") > 0


def is_compiled_with_mlu() -> bool:
    """Return whether an MLU can be used."""
    return device_count("mlu") > 0


def is_compiled_with_ipu() -> bool:
    """Return whether an IPU can be used."""
    return device_count("ipu") > 0


def is_compiled_with_custom_device(device_type: str) -> bool:
    """Return whether a device of a plug-in's type, such as `npu`, can be used."""
    return device_count(device_type) > 0


def is_compiled_with_cinn() -> bool:
    """Return False: Paddle's compiler is not here."""
    return False


def is_compiled_with_distribute() -> bool:
    """Return whether torch can train in several processes."""
    return torch.distributed.is_available()


def get_all_device_type() -> list[str]:
    """Return the device types of this machine, by Paddle's names.

    >>> "cpu" in get_all_device_type()
    True
    """
    return [name for name in ("cpu", "gpu", "xpu", *_CUSTOM_TYPES) if device_count(name)]


def get_all_custom_device_type() -> list[str]:
    """Return the device types of this machine that Paddle gets from plug-ins."""
    return [name for name in _CUSTOM_TYPES if device_count(name)]


def get_available_device() -> list[str]:
    """Return the devices of this machine, by Paddle's names.

    >>> get_available_device()[0]
    'cpu'
    """
    return ["cpu", *_numbered(get_all_device_type()[1:])]


def get_available_custom_device() -> list[str]:
    """Return the devices of this machine whose types Paddle gets from plug-ins."""
    return _numbered(get_all_custom_device_type())


def get_cudnn_version() -> int | None:
    """Return the version of cuDNN; None without a GPU."""
    return torch.backends.cudnn.version() if torch.cuda.is_available() else None


def synchronize(device: object = None) -> None:
    """Wait until a device has finished its work; a CPU always has."""
    chosen = device_of(device)
    if chosen.type != "cpu":
        torch.get_device_module(chosen).synchronize(chosen)


def _numbered(device_types: list[str]) -> list[str]:
    return [f"{name}:{index}" for name in device_types for index in range(device_count(name))]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
