"""Launch Triton kernels, stage tables in pinned memory, copy values to the host asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from mezzo._dtypes import dtype_name

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that mezzo's kernels take."""

_MAX_TABLES = 16
"""Tables that `keep_recent` keeps. Addresses repeat: torch's allocator gives the gradients of a
step the blocks of an earlier one."""


# -- devices ---------------------------------------------------------------------------------------


def needs_sync(device: torch.device) -> bool:
    """Return whether reading from this device synchronizes."""
    return device.type != "cpu"


def is_capturing(device: torch.device) -> bool:
    """Return whether work for this device is being captured: it runs at each replay, not now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device."""
    return device.type == "cuda" and _is_triton_installed()


@cache
def _is_triton_installed() -> bool:
    return find_spec("triton") is not None


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current: Triton launches there, whatever device its arguments are on."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


# -- copies to the host ----------------------------------------------------------------------------


class AsyncCopy:
    """An asynchronous copy of a tensor to the host, into pinned memory."""

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
        """Return whether the copy is complete. Does not synchronize."""
        return self._arrived is None or bool(self._arrived.query())

    def values(self) -> list[float]:
        """Return the values. Call this only after `arrived()` returned True."""
        values: list[float] = self._values.tolist()
        return values

    def result(self) -> torch.Tensor:
        """Return the values as a tensor on the host. Call this only after `arrived()`."""
        return self._values


# -- tables of addresses and sizes -----------------------------------------------------------------


def chunks_of(sizes: Sequence[int], chunk: int) -> torch.Tensor:
    """Return the tensor and the chunk of it that each program reads, int32 [2, programs].

    >>> chunks_of([5, 0, 8], chunk=4).tolist()
    [[0, 0, 2, 2], [0, 1, 0, 1]]
    """
    counts = (torch.tensor(sizes, dtype=torch.int64) + (chunk - 1)) // chunk
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    return torch.stack([owner, within]).to(torch.int32)


def staged_on(device: torch.device, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a table to a device asynchronously; return the copy and its pinned source.

    A captured copy reads the source at every replay: keep it as long as the CUDA graph.
    """
    staged = pinned_for(device, table)
    return staged.to(device, non_blocking=True), staged


def table_on(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """Copy a table to a device asynchronously. Not for captured copies: see `staged_on`."""
    return staged_on(device, table)[0]


def pinned_for(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """Return a table in memory from which a device copies asynchronously.

    A fresh buffer each time: torch frees pinned memory only after its copies, but does not notice
    a buffer that is overwritten before.
    """
    return table.pin_memory() if device.type == "cuda" else table


def keep_recent(tables: dict[Any, Any], key: Any, table: Any) -> None:
    """Add a table to a cache of the last few, and drop the oldest."""
    if key not in tables and len(tables) >= _MAX_TABLES:
        del tables[next(iter(tables))]
    tables[key] = table


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory without gaps, in any order.

    >>> rows = torch.ones(2, 3)
    >>> is_dense(rows.T), is_dense(rows[:, :2]), is_dense(torch.ones(1).expand(2))
    (True, False, False)
    """
    if tensor.is_contiguous():
        return True
    reached = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != reached:
                return False
            reached *= size
    return True


# -- launches --------------------------------------------------------------------------------------

_compiled: dict[Any, Any] = {}
"""Kernels as their first launch compiled them. Called directly, they save Triton's look-up on the
host at every launch."""


def run_kernel(
    kernel: Any,
    programs: int,
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
    device: torch.device,
) -> None:
    """Launch a kernel on the current device.

    `numbers` are its pointers and numbers, on none of which the kernel may specialize; `constants`
    its `tl.constexpr` arguments.
    """
    key = (kernel, device.index, *constants)
    compiled = _compiled.get(key)
    if compiled is None:
        # Triton's interpreter compiles nothing and returns None.
        _compiled[key] = kernel[(programs,)](*numbers, *constants)
    else:
        compiled[(programs, 1, 1)](*numbers, *constants)


@cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for a torch dtype."""
    # Triton is optional, and slow to import.
    import triton.language as tl  # noqa: PLC0415

    return getattr(tl, dtype_name(dtype))
