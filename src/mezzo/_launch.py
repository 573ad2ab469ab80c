"""Launch Triton kernels, hold address tables in pinned memory, and copy values to the host asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from mezzo._dtypes import dtype_name


def needs_sync(device: torch.device) -> bool:
    """Whether reading a tensor of this device makes the host wait for work that is still under way."""
    return device.type != "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether work for this device is being captured: it does not run now, but at every replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class AsyncCopy:
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


_TABLES_KEPT = 16
"""Addresses repeat: torch's allocator gives the gradients of a step the blocks of an earlier
one."""


DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def chunks_of(sizes: Sequence[int], chunk: int) -> torch.Tensor:
    """Which tensor a program looks at and which of its chunks, int32 [2, programs].

    >>> chunks_of([5, 0, 8], chunk=4).tolist()
    [[0, 0, 2, 2], [0, 1, 0, 1]]
    """
    counts = (torch.tensor(sizes, dtype=torch.int64) + (chunk - 1)) // chunk
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    return torch.stack([owner, within]).to(torch.int32)


def staged_on(device: torch.device, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A table on a device without waiting for it, and what it was copied from."""
    staged = pinned_for(device, table)
    return staged.to(device, non_blocking=True), staged


def table_on(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """The same where no captured copy will read it again."""
    return staged_on(device, table)[0]


def pinned_for(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """A table in memory from which a device copies without anybody waiting.

    A fresh buffer each time: torch frees pinned memory only when its copies are done, but knows
    nothing of a buffer that is written again too early.
    """
    return table.pin_memory() if device.type == "cuda" else table


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, in whatever order.

    >>> is_dense(torch.ones(2, 3).T), is_dense(torch.ones(2, 3)[:, :2]), is_dense(torch.ones(1).expand(2))
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


def has_triton(device: torch.device) -> bool:
    """Whether the Triton kernel runs on a device."""
    return device.type == "cuda" and _is_triton_installed()


@cache
def _is_triton_installed() -> bool:
    return find_spec("triton") is not None


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever device its arguments are on."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def keep_recent(tables: dict[Any, Any], key: Any, table: Any) -> None:
    """Keep a table among the last few."""
    if key not in tables and len(tables) >= _TABLES_KEPT:
        del tables[next(iter(tables))]
    tables[key] = table


_compiled: dict[Any, Any] = {}
"""Kernels as the first launch compiled them: called directly, they spare the host Triton's
look-up at every launch."""


def run_kernel(
    kernel: Any,
    programs: int,
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
    device: torch.device,
) -> None:
    """Launch a kernel that specializes on none of its numbers."""
    key = (kernel, device.index, *constants)
    compiled = _compiled.get(key)
    if compiled is None:
        # In the interpreter nothing is compiled, and this gives None.
        _compiled[key] = kernel[(programs,)](*numbers, *constants)
    else:
        compiled[(programs, 1, 1)](*numbers, *constants)


@cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    import triton.language as tl  # type: ignore[import-untyped] # noqa: PLC0415 - as above

    return getattr(tl, dtype_name(dtype))
