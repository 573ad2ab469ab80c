"""Paddle's places (`CPUPlace`, `CUDAPlace`, ...), and the default place (`set_device`)."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from mezzo._errors import user_stack_level
from mezzo._hardware.detect import find_device

_TORCH_TYPES = {"gpu": "cuda", "gpu_pinned": "cpu"}
"""Paddle's device type → torch's, where the names differ."""

_default_device: torch.device | None = None
"""The device of the last `set_device`; None before the first call."""
_warned: set[str] = set()
"""Device types whose absence was warned about in this process."""


@dataclass(frozen=True, eq=False, repr=False)
class Place:
    """`paddle.base.core.Place`: a device by Paddle's name. Paddle's places have no common base."""

    device_type: str = "cpu"
    """Paddle's name of the device type: `cpu`, `gpu`, `xpu`, `npu`, ..."""
    device_id: int = 0

    def __post_init__(self) -> None:
        index, call = self.device_id, self._call()
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(
                f"{call} has the device id {index!r}, which is {type(index).__name__}. It should be"
                " an int: CUDAPlace(0)."
            )
        count = device_count(self.device_type)
        # Without any such device the place stands for another one: see `device_of`.
        if index < 0 or (0 < count <= index and self.torch_type != "cpu"):
            numbers = f"must inside [0, {count})" if count else "must be 0 or more"
            raise ValueError(
                f"Invalid {call}, {numbers}, because {self.device_type.upper()} number on your"
                f" machine is {count}."
            )

    @property
    def torch_type(self) -> str:
        """torch's name of the device type."""
        return _TORCH_TYPES.get(self.device_type, self.device_type)

    @property
    def device(self) -> torch.device:
        """The device of torch that this place uses on this machine."""
        return device_of(self)

    def get_device_id(self) -> int:
        """Return the number of the device."""
        return self.device_id

    def get_device_type(self) -> str:
        """Return Paddle's name of the device type."""
        return self.device_type

    def is_cpu_place(self) -> bool:
        """Return whether this is a `CPUPlace`."""
        return self.device_type == "cpu"

    def is_gpu_place(self) -> bool:
        """Return whether this is a `CUDAPlace`."""
        return self.device_type == "gpu"

    def is_cuda_pinned_place(self) -> bool:
        """Return whether this is a `CUDAPinnedPlace`."""
        return self.device_type == "gpu_pinned"

    def is_xpu_place(self) -> bool:
        """Return whether this is an `XPUPlace`."""
        return self.device_type == "xpu"

    def is_custom_place(self) -> bool:
        """Return whether this is a `CustomPlace`: of a type that Paddle itself does not have."""
        return self.device_type not in {"cpu", "gpu", "gpu_pinned", "xpu", "ipu"}

    def gpu_device_id(self) -> int:
        """Return the number of the GPU."""
        return self.device_id

    custom_device_id = gpu_device_id
    custom_device_type = get_device_type

    def _call(self) -> str:
        """Return the call that makes this place, for messages."""
        return f"{type(self).__name__}({self.device_id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.device_type, self.device_id) == (
            other.device_type,
            other.device_id,
        )

    def __hash__(self) -> int:
        return hash((self.device_type, self.device_id))

    def __repr__(self) -> str:
        return f"Place({_name(self.device_type, self.device_id)})"


class CPUPlace(Place):
    """`paddle.CPUPlace`: the CPU.

    >>> CPUPlace()
    Place(cpu)
    """

    def __init__(self) -> None:
        super().__init__("cpu")


class CUDAPinnedPlace(Place):
    """`paddle.CUDAPinnedPlace`: memory of the CPU that a GPU can read; here the CPU."""

    def __init__(self) -> None:
        super().__init__("gpu_pinned")


class CUDAPlace(Place):
    """`paddle.CUDAPlace`: a GPU, or the default place on a machine without one.

    >>> CUDAPlace(0)
    Place(gpu:0)
    """

    def __init__(self, id: int) -> None:
        super().__init__("gpu", id)


class XPUPlace(Place):
    """`paddle.XPUPlace`: an XPU, or the default place on a machine without one."""

    def __init__(self, id: int) -> None:
        super().__init__("xpu", id)


class NPUPlace(Place):
    """`paddle.NPUPlace`: an NPU, or the default place on a machine without one."""

    def __init__(self, id: int) -> None:
        super().__init__("npu", id)


class MLUPlace(Place):
    """`paddle.MLUPlace`: an MLU, or the default place on a machine without one."""

    def __init__(self, id: int) -> None:
        super().__init__("mlu", id)


class IPUPlace(Place):
    """`paddle.IPUPlace`: an IPU, or the default place on a machine without one."""

    def __init__(self) -> None:
        super().__init__("ipu")


class CustomPlace(Place):
    """`paddle.CustomPlace`: a device of a type that a plug-in adds.

    >>> CustomPlace("npu", 0) == NPUPlace(0)
    True
    """

    def __init__(self, device_type: str, id: int = 0) -> None:
        if not isinstance(device_type, str):
            raise TypeError(
                f"CustomPlace({device_type!r}) is {type(device_type).__name__}. Pass a device type"
                " and a number: CustomPlace('npu', 0)."
            )
        super().__init__(device_type, id)

    def _call(self) -> str:
        return f"CustomPlace({self.device_type!r}, {self.device_id!r})"


_PLACES: dict[str, Any] = {
    "cpu": lambda _: CPUPlace(),
    "gpu": CUDAPlace,
    "cuda": CUDAPlace,
    "gpu_pinned": lambda _: CUDAPinnedPlace(),
    "xpu": XPUPlace,
    "npu": NPUPlace,
    "mlu": MLUPlace,
    "ipu": lambda _: IPUPlace(),
}
"""Device type → the place with a number."""


def set_device(device: str) -> Place:
    """Set the default place, where this dialect creates tensors, layers and executors.

    torch's own default device stays as it is. A device that this machine lacks is replaced by the
    best one it has, with a warning.

    >>> set_device("cpu")
    Place(cpu)
    """
    global _default_device
    if device is None:
        raise ValueError(
            "The device must be a string such as 'cpu', 'gpu' or 'gpu:0', or a place, but got None."
        )
    _default_device = device_of(device)
    return place_of(_default_device)


def get_device() -> str:
    """Return the default place by Paddle's name.

    >>> from mezzo.compat import paddle
    >>> _ = paddle.set_device("cpu")
    >>> get_device()
    'cpu'
    """
    place = place_of(device_of(None))
    return _name(place.device_type, place.device_id)


def chosen_device() -> torch.device | None:
    """Return the device of the last `set_device`; None before the first call."""
    return _default_device


def default_device() -> torch.device:
    """Return the device of new tensors: the default place, or the CPU in a loader's worker."""
    return device_of(None) if get_worker_info() is None else torch.device("cpu")


def device_of(place: Any) -> torch.device:
    """Return the device of torch for a place, a Paddle name (`gpu:0`) or a torch name.

    None is the default place: that of `set_device`, or else the accelerator of this machine, or
    else the CPU. It is also what a place stands for that this machine lacks, with one warning.

    >>> device_of(CPUPlace())
    device(type='cpu')
    """
    if place is None:
        return _default_device or _best_device()
    if isinstance(place, torch.device):
        return place
    parsed = parse_place(place)
    if parsed.torch_type == "cpu":
        return torch.device("cpu")
    if device_count(parsed.device_type):
        return torch.device(parsed.torch_type, parsed.device_id)
    used = device_of(None)
    if parsed.device_type not in _warned:
        _warned.add(parsed.device_type)
        warnings.warn(
            f"{parsed._call()} is used on a machine without {parsed.device_type.upper()}:"
            f" torch {torch.__version__} finds no {parsed.torch_type} device. {place_of(used)!r} is"
            " used instead.",
            UserWarning,
            stacklevel=user_stack_level(),
        )
    return used


def parse_place(place: Any) -> Place:
    """Return the place that a value names, whether or not this machine has it.

    >>> parse_place("gpu:0")
    Place(gpu:0)
    """
    if place is None or isinstance(place, torch.device):
        return place_of(device_of(place))
    if isinstance(place, Place):
        return place
    if isinstance(place, str) and (match := re.fullmatch(r"([a-z_]+)(?::(\d+))?", place)):
        name, index = match.groups()
        if name in _PLACES or _is_torch_type(name):
            number = _current_index(name) if index is None else int(index)
            make = _PLACES.get(name)
            return CustomPlace(name, number) if make is None else make(number)
    raise ValueError(
        "The device must be a string such as 'cpu', 'gpu', 'gpu:0' or 'xpu:0', a place or a"
        f" torch.device, but got {place!r}."
    )


def place_of(device: torch.device) -> Place:
    """Return the place of a device of torch.

    >>> place_of(torch.device("cpu"))
    Place(cpu)
    """
    make = _PLACES.get(device.type)
    number = device.index or 0
    return CustomPlace(device.type, number) if make is None else make(number)


def device_count(device_type: str) -> int:
    """Return how many devices of a type (by Paddle's name or torch's) this machine has.

    >>> device_count("cpu")
    1
    """
    torch_type = _TORCH_TYPES.get(device_type, device_type)
    if torch_type == "cpu":
        return 1
    try:
        return int(torch.get_device_module(torch_type).device_count())
    except (RuntimeError, AttributeError):
        # torch has no such device type, or its back end is not imported.
        return 0


def _best_device() -> torch.device:
    best = find_device(None)
    # Paddle does not use Apple's GPUs.
    return torch.device("cpu") if best.type == "mps" else best


def _current_index(device_type: str) -> int:
    torch_type = _TORCH_TYPES.get(device_type, device_type)
    has_devices = torch_type != "cpu" and device_count(torch_type) > 0
    return (find_device(torch_type).index or 0) if has_devices else 0


def _is_torch_type(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _name(device_type: str, index: int) -> str:
    return device_type if device_type in ("cpu", "gpu_pinned", "ipu") else f"{device_type}:{index}"
