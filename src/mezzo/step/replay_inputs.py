"""What goes into a captured program at each replay and what comes out of it, without a launch of its own.

Copying an input costs the host 10 µs and so does copying the loss, where a replay costs 6 (the host
of an H200). Instead the host leaves a letter in memory that both can reach: where the inputs are,
and where the loss is to go. The program reads it by itself, as its first and as its last act.
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
"""Letters that may lie unread, about as many as launches may wait; whoever is further ahead
waits for the device."""
_LOSSES = 64
"""Losses whose memory is asked for at once."""
_ALIGNED = 16
"""Bytes to which all addresses are aligned, so that as many are moved at a time."""
_CHUNK = 1024
"""Elements that a program copies."""
_LARGEST = 2**31 - 1
"""Elements that a launch can count: it was compiled for a size of 32 bits."""
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What is not cast is copied as whole numbers of its size."""


@dataclass(frozen=True, eq=False)
class _InputCopy:
    """A buffer that the program fills by itself."""

    buffer: torch.Tensor
    dtype: torch.dtype
    """Of the input that it is filled from."""

    @classmethod
    def of(cls, leaf: torch.Tensor, buffer: torch.Tensor) -> _InputCopy | None:
        """None where torch copies better: from another device, into another layout, with a cast that is not the usual one."""
        dense = leaf.is_contiguous() and buffer.is_contiguous() and 0 < leaf.numel() <= _LARGEST
        if leaf.device != buffer.device or leaf.layout is not torch.strided or not dense:
            return None
        if leaf.dtype is buffer.dtype and not leaf.is_complex() and leaf.itemsize in _WHOLE:
            whole = _WHOLE[leaf.itemsize]
            return cls(buffer.view(whole), whole)
        return (
            cls(buffer, leaf.dtype)
            if leaf.dtype is torch.float32 and buffer.dtype in HALF_DTYPES
            else None
        )


@dataclass(eq=False)
class _RingBuffer:
    """Memory of the host that the device reaches too: how many letters are done, then the letters."""

    memory: torch.Tensor
    kept: object
    """What else of the host's memory the program writes to."""
    written: int = 0

    def __post_init__(self) -> None:
        self.words = (c_int64 * self.memory.numel()).from_address(self.memory.data_ptr())

    @property
    def unread(self) -> int:
        """Letters that the device is not done with."""
        return self.written - self.words[0]

    def __del__(self) -> None:
        # What is freed, somebody else may write to, and the device may still be reading.
        if _ring_buffers is not None and self.unread:
            _ring_buffers.append(self)


_ring_buffers: list[_RingBuffer] = []
"""Those of programs that are gone, while the device still has letters to read."""


class ReplayInputs:
    """Letters from the host to one program."""

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        kept: object = None,
    ) -> None:
        on_cuda = device.type == "cuda"
        self._device, self._index = device, device.index if on_cuda else -1
        self._buffers = [
            (buffer, _InputCopy.of(leaf, buffer))
            for leaf, buffer in zip(leaves, buffers, strict=True)
        ]
        self._carried = [carried for _, carried in self._buffers if carried is not None]
        self._width = len(self._carried) + 1
        _ring_buffers[:] = [box for box in _ring_buffers if box.unread]
        self._box = _RingBuffer(
            torch.zeros(1 + SLOTS * self._width, dtype=torch.int64, pin_memory=on_cuda), kept
        )
        self._count, self._letter = (
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(self._width, dtype=torch.int64, device=device),
        )
        self._nothing = torch.zeros((), device=device)
        self._sends = True
        """Whether the program has a loss to send."""
        self._losses: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        """Where losses can go, for each stream: memory is handed on in the order of the stream
        that it was asked for on."""
        self._brought: list[torch.Tensor] = []
        """Copies of inputs that could not be read as they are, until the next letter."""

    # -- on the host -------------------------------------------------------------------------------

    def rehearse(self, leaves: Sequence[torch.Tensor]) -> None:
        """Let a letter go through before anything is captured, which compiles the kernels."""
        self.write(leaves)
        self.around(lambda _: self._nothing, None)

    def write(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Write the letter of the next replay, and give the tensor that its loss will be in, if it has one."""
        box, words = self._box, self._box.words
        if box.unread >= SLOTS:
            torch.cuda.synchronize(self._device)
        at = 1 + box.written % SLOTS * self._width
        self._brought.clear()
        for leaf, (buffer, carried) in zip(leaves, self._buffers, strict=True):
            if carried is None:
                buffer.copy_(leaf, non_blocking=True)
                continue
            address = leaf.data_ptr()
            if address % _ALIGNED or leaf.get_device() != self._index or not leaf.is_contiguous():
                self._brought.append(
                    torch.empty_like(
                        leaf, device=self._device, memory_format=torch.contiguous_format
                    ).copy_(leaf.detach())
                )
                address = self._brought[-1].data_ptr()
            words[at] = address
            at += 1
        loss = self._loss() if self._sends else None
        words[at] = 0 if loss is None else loss.data_ptr()
        box.written += 1
        return loss

    def _loss(self) -> torch.Tensor:
        losses = self._losses[raw_stream(self._index) if self._index >= 0 else -1]
        if not losses:
            page = torch.empty(_LOSSES, _ALIGNED // torch.float32.itemsize, device=self._device)
            # Neighbours in memory, and else strangers: no views, and each with a version of its
            # own.
            losses += [one.data for one in page[:, 0].unbind()]
        return losses.pop()

    # -- on the device -----------------------------------------------------------------------------

    def around(self, run: Callable[[Any], Any], held: Any) -> Any:
        """What a program does with a letter: fetch it, run on the buffers, and send the loss."""
        self.load_inputs()
        returned = run(held)
        self.store_loss(returned)
        return returned

    def load_inputs(self) -> None:
        """Fetch a letter, and fill the buffers."""
        # Triton is optional, and takes a while to import.
        from triton import next_power_of_2  # type: ignore[import-untyped] # noqa: PLC0415

        from mezzo.step.triton_kernels import load_input, read_record  # noqa: PLC0415 - as above

        with _launch.device_guard(self._device):
            numbers = (self._box.memory, self._letter, self._count, self._width)
            _launch.run_kernel(
                read_record, 1, numbers, (SLOTS, next_power_of_2(self._width)), self._device
            )
            for place, carried in enumerate(self._carried):
                size, dtypes = (
                    carried.buffer.numel(),
                    (
                        _launch.triton_dtype(carried.dtype),
                        _launch.triton_dtype(carried.buffer.dtype),
                    ),
                )
                _launch.run_kernel(
                    load_input,
                    -(-size // _CHUNK),
                    (self._letter, carried.buffer, size, place),
                    (*dtypes, _CHUNK),
                    self._device,
                )

    def store_loss(self, returned: Any) -> None:
        """Put what a body returned where the letter says, if it is a loss; with this the letter is done."""
        from mezzo.step.triton_kernels import store_loss  # noqa: PLC0415 - as above

        self._sends = (
            isinstance(returned, torch.Tensor)
            and returned.dtype is torch.float32
            and returned.dim() == 0
            and returned.device == self._device
        )
        numbers = (
            self._box.memory,
            self._letter,
            self._count,
            returned if self._sends else self._nothing,
            self._width - 1,
        )
        with _launch.device_guard(self._device):
            _launch.run_kernel(store_loss, 1, numbers, (), self._device)
