"""Pass inputs to a captured graph, and get its loss, without a launch for each copy.

A copy of an input costs the host 10 µs, as does a copy of the loss; a replay costs 6 (the host of
an H200). Instead the host writes the addresses of inputs and loss to a pinned ring buffer, one
record per replay. The graph reads its record first, copies the inputs into static buffers and
stores the loss last, so that no copy is launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import torch

from mezzo import _launch
from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import raw_stream

SLOTS = 1024
"""Records that the device may not have read yet, about as many as launches can be queued; a host
that is further ahead synchronizes."""
_LOSSES = 64
"""Losses whose memory is allocated at once."""
_ALIGNMENT = 16
"""Bytes to which all addresses are aligned, so that as many are moved at a time."""
_CHUNK = 1024
"""Elements that a Triton program copies."""
_MAX_ELEMENTS = 2**31 - 1
"""Elements of an input at most: the kernel is compiled for a 32-bit size."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Inputs that are not cast are copied as integers of their item size."""


@dataclass(frozen=True, eq=False)
class _InputCopy:
    """A static buffer that the graph fills itself."""

    buffer: torch.Tensor
    dtype: torch.dtype
    """Dtype to read the input as."""

    @classmethod
    def of(cls, leaf: torch.Tensor, buffer: torch.Tensor) -> _InputCopy | None:
        """Return how the graph copies an input; None where torch has to copy it.

        That is from another device, to another memory format, or with an unusual cast.
        """
        fits = leaf.is_contiguous() and buffer.is_contiguous()
        fits = fits and 0 < leaf.numel() <= _MAX_ELEMENTS
        if leaf.device != buffer.device or leaf.layout is not torch.strided or not fits:
            return None
        if leaf.dtype is buffer.dtype and not leaf.is_complex() and leaf.itemsize in _INTEGERS:
            integer = _INTEGERS[leaf.itemsize]
            return cls(buffer.view(integer), integer)
        if leaf.dtype is torch.float32 and buffer.dtype in HALF_DTYPES:
            return cls(buffer, leaf.dtype)
        return None


@dataclass(eq=False)
class _RingBuffer:
    """Pinned memory: the number of records that the device is done with, then the records."""

    memory: torch.Tensor
    host_memory: object
    """Other pinned memory that the graph writes to, kept alive."""
    written: int = 0
    """Records written by the host."""

    def __post_init__(self) -> None:
        self.values = (c_int64 * self.memory.numel()).from_address(self.memory.data_ptr())

    @property
    def unread(self) -> int:
        """Records that the device is not done with."""
        return self.written - self.values[0]

    def count_record(self) -> None:
        """Count a record that the host has written."""
        self.written += 1

    def __del__(self) -> None:
        # Keep the buffer alive: the GPU may still read it after this object is gone.
        if _unread_buffers is not None and self.unread:
            _unread_buffers.append(self)


_unread_buffers: list[_RingBuffer] = []
"""Ring buffers of deleted graphs with records that the device may still read."""


class ReplayInputs:
    """Passes the addresses of inputs and loss to one captured graph."""

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        host_memory: object = None,
    ) -> None:
        on_cuda = device.type == "cuda"
        self._device, self._index = device, device.index if on_cuda else -1
        self._buffers = [
            (buffer, _InputCopy.of(leaf, buffer))
            for leaf, buffer in zip(leaves, buffers, strict=True)
        ]
        self._copies = [copy for _, copy in self._buffers if copy is not None]
        self._width = len(self._copies) + 1
        """Addresses in a record: of the inputs, then of the loss."""
        _unread_buffers[:] = [ring for ring in _unread_buffers if ring.unread]
        size = 1 + SLOTS * self._width
        self._ring = _RingBuffer(
            torch.zeros(size, dtype=torch.int64, pin_memory=on_cuda), host_memory
        )
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        """Records that the device is done with."""
        self._record = torch.zeros(self._width, dtype=torch.int64, device=device)
        """The record of the current replay, on the device."""
        self._zero = torch.zeros((), device=device)
        self._stores_loss = True
        """Whether the graph returns a loss that it stores itself."""
        self._losses: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        """Memory for losses by stream: the allocator reuses memory in the order of the stream that
        it was allocated on."""
        self._copied: list[torch.Tensor] = []
        """Copies of inputs that cannot be read in place, alive until the next record."""

    # -- on the host -------------------------------------------------------------------------------

    def warm_up(self, leaves: Sequence[torch.Tensor]) -> None:
        """Write and read one record before the capture, which compiles the kernels."""
        self.write(leaves)
        self.wrap(lambda _: self._zero)(None)

    def write(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Write the record of the next replay; return the tensor for its loss, if it has one."""
        ring, values = self._ring, self._ring.values
        if ring.unread >= SLOTS:
            torch.cuda.synchronize(self._device)
        index = 1 + ring.written % SLOTS * self._width
        self._copied.clear()
        for leaf, (buffer, copy) in zip(leaves, self._buffers, strict=True):
            if copy is None:
                buffer.copy_(leaf, non_blocking=True)
                continue
            address = leaf.data_ptr()
            if address % _ALIGNMENT or leaf.get_device() != self._index or not leaf.is_contiguous():
                self._copied.append(
                    torch.empty_like(
                        leaf, device=self._device, memory_format=torch.contiguous_format
                    ).copy_(leaf.detach())
                )
                address = self._copied[-1].data_ptr()
            values[index] = address
            index += 1
        loss = self._allocate_loss() if self._stores_loss else None
        values[index] = 0 if loss is None else loss.data_ptr()
        ring.count_record()
        return loss

    def _allocate_loss(self) -> torch.Tensor:
        losses = self._losses[raw_stream(self._index) if self._index >= 0 else -1]
        if not losses:
            page = torch.empty(_LOSSES, _ALIGNMENT // torch.float32.itemsize, device=self._device)
            # `.data`: not views, each with its own version counter.
            losses += [loss.data for loss in page[:, 0].unbind()]
        return losses.pop()

    # -- on the device -----------------------------------------------------------------------------

    def wrap(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function to capture: load the inputs, run on the buffers, store the loss."""

        def run_with_record(buffers: Any) -> Any:
            self.load_inputs()
            returned = run(buffers)
            self.store_loss(returned)
            return returned

        return run_with_record

    def load_inputs(self) -> None:
        """Read the next record and fill the static buffers."""
        # Imported here: Triton is optional and slow to import.
        from triton import next_power_of_2  # type: ignore[import-untyped] # noqa: PLC0415

        from mezzo.step.triton_kernels import load_input, read_record  # noqa: PLC0415

        with _launch.device_guard(self._device):
            numbers = (self._ring.memory, self._record, self._count, self._width)
            constants = (SLOTS, next_power_of_2(self._width))
            _launch.run_kernel(read_record, 1, numbers, constants, self._device)
            for index, copy in enumerate(self._copies):
                size = copy.buffer.numel()
                dtypes = map(_launch.triton_dtype, (copy.dtype, copy.buffer.dtype))
                _launch.run_kernel(
                    load_input,
                    -(-size // _CHUNK),
                    (self._record, copy.buffer, size, index),
                    (*dtypes, _CHUNK),
                    self._device,
                )

    def store_loss(self, returned: Any) -> None:
        """Store what the body returned, if it is a loss; mark the record as done."""
        from mezzo.step.triton_kernels import store_loss  # noqa: PLC0415

        self._stores_loss = (
            isinstance(returned, torch.Tensor)
            and returned.dtype is torch.float32
            and returned.dim() == 0
            and returned.device == self._device
        )
        loss = returned if self._stores_loss else self._zero
        numbers = (self._ring.memory, self._record, self._count, loss, self._width - 1)
        with _launch.device_guard(self._device):
            _launch.run_kernel(store_loss, 1, numbers, (), self._device)
