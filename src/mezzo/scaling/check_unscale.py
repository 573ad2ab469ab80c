"""Check and unscale many gradients in one pass, and flag the gradients that are not finite.

On CUDA a Triton kernel does it in one launch over a table of addresses. Without Triton, torch's
kernel does it; flags for single gradients then cost a second pass. Nothing here synchronizes. Flags
are set to 1 and never reset: the caller zeroes them. `counted` collects the numbers of non-finite
and of small values in the same pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mezzo import _launch
from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo._torch import check_and_unscale_, foreach_norm, raw_stream
from mezzo.scaling.gradient_counts import CountedGradients

CHUNK = 2048
"""Elements that a program multiplies: 500M of float16 take 0.54, 0.53, 0.69 and 0.69 ms with
1024, 2048, 4096 and 8192 on an H200 (a copy: 0.47)."""
CHECK_CHUNK = 4096
"""Elements that a program only checks: the same takes 0.34, 0.25, 0.24 and 0.23 ms. Larger chunks
are slower for small gradients."""


@dataclass(frozen=True)
class GradientTable:
    """Addresses and sizes of the gradients of one launch, on the device."""

    addresses: torch.Tensor
    """int64 [gradients]."""
    sizes: torch.Tensor
    """int64 [gradients]: numbers of elements."""
    chunks: torch.Tensor
    """int32 [2, programs]: the gradient of each program, and the chunk of that gradient."""
    staged: tuple[torch.Tensor, ...] = ()
    """Pinned sources of the copies, kept because a captured copy reads them at every replay."""


def check_and_unscale(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor,
    found_inf: torch.Tensor,
    flags: torch.Tensor | None = None,
    counted: CountedGradients | None = None,
) -> None:
    """Multiply gradients by `factor` in place; flag results that are not finite.

    The gradients have one dtype and device. `factor` and `found_inf` are float32 tensors of one
    element; `found_inf` becomes 1 if any result is not finite. `flags` is int32 with one element
    per gradient. A factor of 1 changes nothing, bit for bit.
    """
    _run(gradients, factor, found_inf, flags, counted)


def check(
    gradients: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    flags: torch.Tensor | None = None,
    counted: CountedGradients | None = None,
) -> None:
    """Flag gradients that are not finite, as `check_and_unscale` does, without writing to them."""
    _run(gradients, None, found_inf, flags, counted)


def make_table(
    gradients: Sequence[torch.Tensor],
    chunk: int,
    chunks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> GradientTable:
    """Create the table for one launch over dense gradients of one dtype and device.

    `chunks`, which depends on the sizes alone, may be reused from an earlier table.
    """
    sizes = [gradient.numel() for gradient in gradients]
    device = gradients[0].device
    tensors, staged = _launch.staged_on(
        device,
        torch.tensor([[gradient.data_ptr() for gradient in gradients], sizes], dtype=torch.int64),
    )
    if chunks is None:
        chunks = _launch.staged_on(device, _launch.chunks_of(sizes, chunk))
    return GradientTable(tensors[0], tensors[1], chunks[0], (staged, chunks[1]))


def launch(
    table: GradientTable,
    dtype: torch.dtype,
    factor: torch.Tensor | None,
    found_inf: torch.Tensor,
    flags: torch.Tensor | None,
    chunk: int,
    *,
    write: bool = False,
    inverse: bool = False,
    counted: CountedGradients | None = None,
) -> torch.Tensor:
    """Run the kernel over a table that was made with this chunk, on the current device.

    With `inverse`, gradients are divided by `factor`. With a factor and without `write`, returns
    the sums of squares of the gradients times the factor, one per program.
    """
    programs = table.chunks.shape[1]
    summed = factor is not None and not write
    squares = (
        torch.empty(programs, dtype=torch.float32, device=found_inf.device) if summed else found_inf
    )
    if counted is not None and _launch.is_capturing(found_inf.device):
        keep_captured(counted.memory)
    if programs:
        numbers = (
            table.addresses,
            table.sizes,
            table.chunks,
            found_inf if factor is None else factor,
            found_inf,
            found_inf if flags is None else flags,
            squares,
            found_inf if counted is None else counted.memory,
            0 if counted is None else counted.first_slot,
        )
        constants = (
            _launch.triton_dtype(dtype),
            chunk,
            write,
            flags is not None,
            summed,
            inverse,
            counted is not None,
        )
        _launch.run_kernel(_kernel(), programs, numbers, constants, found_inf.device)
    return squares


def _run(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found_inf: torch.Tensor,
    flags: torch.Tensor | None,
    counted: CountedGradients | None,
) -> None:
    if not gradients:
        return
    first = gradients[0]
    if first.dtype not in _launch.DTYPES:
        raise UnsupportedError(
            f"Gradients of {dtype_name(first.dtype)} cannot be checked. Cast them to float32, or"
            " view complex ones as real."
        )
    if not _launch.has_triton(first.device):
        _run_in_torch(gradients, factor, found_inf, flags, counted)
        return
    # The kernel does not see strides. Strided gradients go through it as copies, so that all are
    # treated alike to the last bit of a NaN.
    all_contiguous = all(map(torch.Tensor.is_contiguous, gradients))
    dense = (
        gradients
        if all_contiguous
        else [
            gradient if _launch.is_dense(gradient) else gradient.contiguous()
            for gradient in gradients
        ]
    )
    _run_in_triton(dense, factor, found_inf, flags, counted)
    if factor is not None:
        for gradient, copy in zip(gradients, dense, strict=True):
            if copy is not gradient:
                gradient.copy_(copy)


# -- Triton ----------------------------------------------------------------------------------------

_tables: dict[Any, GradientTable] = {}
_chunks: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
_captured: list[Any] = []
"""Tables and counts that CUDA graphs of the user use at every replay. They stay for the whole
process: nothing shows when such a graph is freed."""


class _Capture(threading.local):
    """Tables that the capture of this thread reads; None outside of captures."""

    tables: list[Any] | None = None


_capture = _Capture()


@contextmanager
def captured_tables() -> Iterator[list[Any]]:
    """Collect the tables that a capture of this thread reads; keep them as long as its graph."""
    outer, _capture.tables = _capture.tables, []
    try:
        yield _capture.tables
    finally:
        _capture.tables = outer


def _run_in_triton(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found_inf: torch.Tensor,
    flags: torch.Tensor | None,
    counted: CountedGradients | None,
) -> None:
    device, write = gradients[0].device, factor is not None
    chunk = CHUNK if write else CHECK_CHUNK
    with _launch.device_guard(device):
        table, dtype = _table(gradients, chunk), gradients[0].dtype
        launch(table, dtype, factor, found_inf, flags, chunk, write=write, counted=counted)
    if write:
        # Autograd does not see what a Triton kernel writes.
        torch.autograd.graph.increment_version(gradients)


@cache
def _kernel() -> Any:
    # Triton is optional, and slow to import.
    from mezzo.scaling.triton_kernels import check_kernel  # noqa: PLC0415

    return check_kernel


def _table(gradients: Sequence[torch.Tensor], chunk: int) -> GradientTable:
    """Return the table of these gradients, cached while addresses and sizes stay the same."""
    device = gradients[0].device
    on_cuda = device.type == "cuda"
    # Part of the key: the copy of a table is ordered before the launch only on its own stream.
    stream = raw_stream(device.index) if on_cuda else None
    addresses, sizes = (
        tuple(map(torch.Tensor.data_ptr, gradients)),
        tuple(map(torch.Tensor.numel, gradients)),
    )
    layout = (device.index, stream, chunk, sizes)
    table = _tables.get((layout, addresses))
    capturing = on_cuda and torch.cuda.is_current_stream_capturing()
    if table is not None:
        if capturing:
            keep_captured(table)
        return table
    # Between steps gradients change their addresses and keep their sizes.
    table = make_table(gradients, chunk, _chunks.get(layout))
    if capturing:
        # Not cached: a captured copy fills it only at the first replay.
        keep_captured(table)
    else:
        _launch.keep_recent(_tables, (layout, addresses), table)
        _launch.keep_recent(_chunks, layout, (table.chunks, table.staged[1]))
    return table


def keep_captured(table: Any) -> None:
    """Keep a table, or other memory, as long as the graph that is being captured."""
    (_captured if _capture.tables is None else _capture.tables).append(table)


# -- torch -----------------------------------------------------------------------------------------


def _run_in_torch(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found_inf: torch.Tensor,
    flags: torch.Tensor | None,
    counted: CountedGradients | None = None,
) -> None:
    if counted is not None:
        counted.add(gradients)
    if factor is not None:
        if gradients[0].is_cuda and gradients[0].dtype is torch.bfloat16:
            _multiply(gradients, factor)
        else:
            check_and_unscale_(list(gradients), found_inf, factor)
            if flags is None:
                return
    # An empty gradient has no largest magnitude.
    filled = [gradient if gradient.numel() else gradient.new_zeros(()) for gradient in gradients]
    # The largest magnitude is NaN or infinite if an element is.
    is_nonfinite = torch.stack(foreach_norm(filled, ord=torch.inf)).isfinite().logical_not_()
    torch.maximum(found_inf, is_nonfinite.any(), out=found_inf)
    if flags is not None:
        flags.logical_or_(is_nonfinite)


def _multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a factor: torch's kernel does not take bfloat16 on CUDA (2.11)."""
    for gradient in gradients:
        gradient.copy_(
            torch.where(factor == 1.0, gradient, (gradient.float() * factor).to(gradient.dtype))
        )
