"""Contexts of MXNet: `cpu`, `gpu`, `cpu_pinned`, and the current context of a thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any, Self

import torch

from mezzo._errors import choices, user_stack_level

_DEVICE_TYPES = ("cpu", "gpu", "cpu_pinned", "cpu_shared")


class Context:
    """`mxnet.Context`: a device, made from a type and an id or from another context.

    As a context manager it is the current context of this thread. A GPU on a machine without CUDA
    is the CPU, with one warning.

    >>> with Context("cpu", 0):
    ...     current_context()
    cpu(0)
    """

    def __init__(self, device_type: str | Context, device_id: int = 0) -> None:
        if isinstance(device_type, Context):
            device_type, device_id = device_type._key()
        if device_type not in _DEVICE_TYPES:
            raise ValueError(f"Unknown device type {device_type!r}. {choices(_DEVICE_TYPES)}")
        if not isinstance(device_id, int):
            raise TypeError(f"device_id should be a number, got {device_id!r}. Pass mx.gpu(0).")
        self.device_type: str = device_type
        self.device_id: int = device_id
        self._previous: list[Context] = []

    @property
    def device(self) -> torch.device:
        """The torch device. Raises ValueError for a GPU that this machine does not have."""
        if self.device_type != "gpu":
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if count == 0:
            _warn_without_gpu(self)
            return torch.device("cpu")
        if not 0 <= self.device_id < count:
            there = ", ".join(f"gpu({index})" for index in range(count))
            raise ValueError(f"{self} does not exist on this machine. {choices([there])}")
        return torch.device("cuda", self.device_id)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this device, in pinned memory for `cpu_pinned`."""
        tensor = tensor.to(self.device)
        if self.device_type == "cpu_pinned" and torch.cuda.is_available():
            return tensor.pin_memory()
        return tensor

    def empty_cache(self) -> None:
        """Release the memory that torch's allocator holds but does not use."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        self._previous.append(current_context())
        _state.context = self
        return self

    def __exit__(self, *_: object) -> None:
        _state.context = self._previous.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    def _key(self) -> tuple[str, int]:
        return self.device_type, self.device_id


def cpu(device_id: int = 0) -> Context:
    """Return the context of the CPU. All ids are the same memory."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """Return the context of a GPU; on a machine without CUDA it runs on the CPU and warns."""
    return Context("gpu", device_id)


def cpu_pinned(device_id: int = 0) -> Context:
    """Return the context of pinned memory, from which copies to a GPU are asynchronous."""
    return Context("cpu_pinned", device_id)


def num_gpus() -> int:
    """Return the number of GPUs."""
    return torch.cuda.device_count()


def current_context() -> Context:
    """Return the context of the innermost `with Context(...)` of this thread, else `cpu(0)`."""
    return _state.context


def context_of(tensor: torch.Tensor) -> Context:
    """Return the context of a tensor.

    >>> context_of(torch.ones(1))
    cpu(0)
    """
    device = tensor.device
    if device.type == "cuda":
        return gpu(device.index or 0)
    return cpu_pinned() if torch.cuda.is_initialized() and tensor.is_pinned() else cpu()


def one_device(ctx: Any) -> torch.device:
    """Return the torch device of a context, or of a list of contexts of the same device."""
    contexts = list(ctx) if isinstance(ctx, Iterable) else [ctx or current_context()]
    for context in contexts:
        if not isinstance(context, Context):
            raise TypeError(
                f"Expected a Context or a list of them, got {context!r}. Pass mx.cpu() or"
                " mx.gpu(0)."
            )
    devices = {context.device for context in contexts}
    if len(devices) != 1:
        raise ValueError(
            f"A network is on one device here, got ctx={contexts}. Pass one context. For several"
            " GPUs start one process for each and wrap the network in"
            " torch.nn.parallel.DistributedDataParallel."
        )
    return devices.pop()


class _State(threading.local):
    context = cpu()


_state = _State()
_has_warned = False


def _warn_without_gpu(context: Context) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{context} was requested, but torch finds no CUDA device: running on the CPU.",
            stacklevel=user_stack_level(),
        )
