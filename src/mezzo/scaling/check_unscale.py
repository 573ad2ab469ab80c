"""One pass over the bytes of many gradients: multiply each by a factor, find what is not finite, and say in which gradient.

On CUDA a Triton kernel does it in one launch over a table of addresses. Where Triton is missing
torch's kernel does it, and flags of single gradients, asked for, cost a second pass. Nothing here
reads from the device. Flags are raised, never lowered: whoever passes them zeroes them.
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

CHUNK = 2048
"""Elements that a program multiplies: 500M of float16 take 0.54, 0.53, 0.69 and 0.69 ms with
1024, 2048, 4096 and 8192 on an H200 (a copy: 0.47)."""
CHECK_CHUNK = 4096
"""Elements that a program only looks at: 0.34, 0.25, 0.24 and 0.23 ms likewise; larger chunks
serve small gradients worse."""


@dataclass(frozen=True)
class GradientTable:
    """Where the gradients of one launch lie."""

    addresses: torch.Tensor
    """int64 [gradients]."""
    sizes: torch.Tensor
    """int64 [gradients]: numbers of elements."""
    chunks: torch.Tensor
    """int32 [2, programs]: which gradient a program looks at, and which of its chunks."""
    staged: tuple[torch.Tensor, ...] = ()
    """What was copied to the device, kept because a captured copy reads it at every replay."""


def check_and_unscale(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor,
    found: torch.Tensor,
    flags: torch.Tensor | None = None,
) -> None:
    """Multiply gradients of one dtype and device by `factor` in place, and raise `found`, and `flags` at each gradient's place, where a result is not finite.

    `factor` and `found` are float32 tensors of one element, `flags` is int32 with one element a
    gradient. A factor of 1 changes nothing, bit for bit.
    """
    _run(gradients, factor, found, flags)


def check(
    gradients: Sequence[torch.Tensor], found: torch.Tensor, flags: torch.Tensor | None = None
) -> None:
    """Raise `found` and `flags` where a gradient is not finite, and write to none."""
    _run(gradients, None, found, flags)


def make_table(
    gradients: Sequence[torch.Tensor],
    chunk: int,
    chunks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> GradientTable:
    """Lay out dense gradients of one dtype and device for one launch; what depends on their sizes alone may be there already."""
    sizes = [gradient.numel() for gradient in gradients]
    device = gradients[0].device
    tensors, staged = _launch.staged_on(
        device,
        torch.tensor([[gradient.data_ptr() for gradient in gradients], sizes], dtype=torch.int64),
    )
    if chunks is None:
        chunks = _launch.staged_on(device, _launch.chunks_of(sizes, chunk))
    return GradientTable(tensors[0], tensors[1], chunks[0], (staged, chunks[1]))


@cache
def _kernel() -> Any:
    # Triton is optional, and takes a while to import.
    from mezzo.scaling.triton_kernels import check_kernel  # noqa: PLC0415

    return check_kernel


def _run(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found: torch.Tensor,
    flags: torch.Tensor | None,
) -> None:
    """Check, and multiply if there is a factor."""
    if not gradients:
        return
    first = gradients[0]
    if first.dtype not in _launch.DTYPES:
        raise UnsupportedError(
            f"Gradients of {dtype_name(first.dtype)} cannot be checked. Cast them to float32, or"
            " view complex ones as real."
        )
    if not _launch.has_triton(first.device):
        _run_in_torch(gradients, factor, found, flags)
        return
    # The kernel sees memory, not strides. What is strided goes through it as a copy, so that all
    # gradients are treated alike to the last bit of a NaN.
    alike = all(map(torch.Tensor.is_contiguous, gradients))
    dense = (
        gradients
        if alike
        else [
            gradient if _launch.is_dense(gradient) else gradient.contiguous()
            for gradient in gradients
        ]
    )
    _run_in_triton(dense, factor, found, flags)
    if factor is not None:
        for gradient, copy in zip(gradients, dense, strict=True):
            if copy is not gradient:
                gradient.copy_(copy)


# -- Triton ----------------------------------------------------------------------------------------

_tables: dict[Any, GradientTable] = {}
_chunks: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
_captured: list[GradientTable] = []
"""Tables that a CUDA graph of the user's own reads at every replay: nothing says when the last
one is, so they stay."""


class _Capture(threading.local):
    tables: list[GradientTable] | None = None


_capture = _Capture()


@contextmanager
def captured_tables() -> Iterator[list[GradientTable]]:
    """Collect the tables that a capture of this thread reads, for its CUDA graph to keep."""
    outer, _capture.tables = _capture.tables, []
    try:
        yield _capture.tables
    finally:
        _capture.tables = outer


def _run_in_triton(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found: torch.Tensor,
    flags: torch.Tensor | None,
) -> None:
    device, write = gradients[0].device, factor is not None
    chunk = CHUNK if write else CHECK_CHUNK
    with _launch.device_guard(device):
        launch(
            _table(gradients, chunk), gradients[0].dtype, factor, found, flags, chunk, write=write
        )
    if write:
        # Autograd sees what torch's ops write; of this it is told.
        torch.autograd.graph.increment_version(gradients)


def _table(gradients: Sequence[torch.Tensor], chunk: int) -> GradientTable:
    """The table of these gradients, made anew only when an address or a size differs."""
    device = gradients[0].device
    on_cuda = device.type == "cuda"
    # Its copy is ordered before the launch only on the stream that made it.
    stream = raw_stream(device.index) if on_cuda else None
    addresses, sizes = (
        tuple(map(torch.Tensor.data_ptr, gradients)),
        tuple(map(torch.Tensor.numel, gradients)),
    )
    laid = (device.index, stream, chunk, sizes)
    table = _tables.get((laid, addresses))
    capturing = on_cuda and torch.cuda.is_current_stream_capturing()
    if table is not None:
        if capturing:
            _keep_captured(table)
        return table
    # Gradients move from step to step and keep their sizes.
    table = make_table(gradients, chunk, _chunks.get(laid))
    if capturing:
        # What a captured copy fills, nobody else may use: it is empty until the first replay.
        _keep_captured(table)
    else:
        _launch.keep_recent(_tables, (laid, addresses), table)
        _launch.keep_recent(_chunks, laid, (table.chunks, table.staged[1]))
    return table


def _keep_captured(table: GradientTable) -> None:
    (_captured if _capture.tables is None else _capture.tables).append(table)


def launch(
    table: GradientTable,
    dtype: torch.dtype,
    factor: torch.Tensor | None,
    found: torch.Tensor,
    flags: torch.Tensor | None,
    chunk: int,
    *,
    write: bool = False,
    inverse: bool = False,
) -> torch.Tensor:
    """Run the kernel over a table that was made with this chunk, on the current device; with `inverse` the factor is one over what is given.

    With a factor and without writing, the sums of squares of the gradients times the factor come
    back, one a program.
    """
    programs = table.chunks.shape[1]
    summed = factor is not None and not write
    squares = torch.empty(programs, dtype=torch.float32, device=found.device) if summed else found
    if programs:
        numbers = (
            table.addresses,
            table.sizes,
            table.chunks,
            found if factor is None else factor,
            found,
            found if flags is None else flags,
            squares,
        )
        _launch.run_kernel(
            _kernel(),
            programs,
            numbers,
            (_launch.triton_dtype(dtype), chunk, write, flags is not None, summed, inverse),
            found.device,
        )
    return squares


# -- torch -----------------------------------------------------------------------------------------


def _run_in_torch(
    gradients: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    found: torch.Tensor,
    flags: torch.Tensor | None,
) -> None:
    if factor is not None:
        if gradients[0].is_cuda and gradients[0].dtype is torch.bfloat16:
            _multiply(gradients, factor)
        else:
            check_and_unscale_(list(gradients), found, factor)
            if flags is None:
                return
    # An empty gradient has no largest magnitude.
    filled = [gradient if gradient.numel() else gradient.new_zeros(()) for gradient in gradients]
    # The largest magnitude is NaN or infinite where an element is.
    bad = torch.stack(foreach_norm(filled, ord=torch.inf)).isfinite().logical_not_()
    torch.maximum(found, bad.any(), out=found)
    if flags is not None:
        flags.logical_or_(bad)


def _multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Stands in for torch's kernel, which knows no bfloat16 on CUDA (2.11)."""
    for gradient in gradients:
        gradient.copy_(
            torch.where(factor == 1.0, gradient, (gradient.float() * factor).to(gradient.dtype))
        )
