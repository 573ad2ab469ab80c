"""Copy large pinned inputs to the device on another stream, while the previous step runs.

A copy into the buffers that a captured graph reads has to wait for the graph's last replay. Large
inputs are copied to a staging buffer in the meantime, and from there to the graph's buffer, which
takes a fraction of the time. There are two staging buffers for each input, so that the copy for the
next step can run during this one.

As with any `non_blocking` copy, the host must not change an input before its copy is done, and an
input that the device itself writes to, by an asynchronous copy to the host, must have arrived.
Freeing it is safe: torch reuses pinned memory after the copies from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mezzo import _launch

MIN_BYTES = 64 * 1024
"""Smaller inputs are copied in less time than two streams take to wait for each other."""


class HostInput(NamedTuple):
    """An input on the host, and the buffer on the device that it is copied to."""

    buffer: torch.Tensor
    leaf: torch.Tensor


class HostInputs:
    """Copies inputs from the host for the captured graphs of one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._stages = (_Stage(device), _Stage(device))
        self._calls = 0

    def copy(self, inputs: Sequence[HostInput]) -> None:
        """Copy inputs to their buffers, in the order of the current stream."""
        staged = []
        for input_ in inputs:
            if is_staged(input_.leaf):
                staged.append(input_)
            else:
                input_.buffer.copy_(input_.leaf, non_blocking=True)
        if staged:
            self._copy_staged(staged)

    def _copy_staged(self, inputs: list[HostInput]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current, stage = torch.cuda.current_stream(self._device), self._stages[self._calls % 2]
        self._calls += 1
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(stage.used)
            copies = [stage.copy(place, leaf) for place, (_, leaf) in enumerate(inputs)]
            stage.copied.record(self._stream)
        current.wait_event(stage.copied)
        for (buffer, _), copied in zip(inputs, copies, strict=True):
            buffer.copy_(copied, non_blocking=True)
            # A larger input replaces the staging buffer, whose memory must outlive this copy.
            copied.record_stream(current)
        stage.used.record(current)


class _Stage:
    """Staging buffers of one call, which the call after the next one uses again."""

    def __init__(self, device: torch.device) -> None:
        self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()
        """Recorded after the copies to the staging buffers, and after those from them."""
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}
        """Bytes by the place of an input."""

    def copy(self, place: int, leaf: torch.Tensor) -> torch.Tensor:
        """Copy an input on the current stream, with its dtype and strides: as bytes, not cast."""
        memory = self._memory.get(place)
        if memory is None or memory.numel() < leaf.nbytes:
            # Not an inference tensor, which later calls could not write.
            with torch.inference_mode(False):
                memory = torch.empty(leaf.nbytes, dtype=torch.uint8, device=self._device)
            self._memory[place] = memory
        typed = memory[: leaf.nbytes].view(leaf.dtype)
        copied = typed.as_strided(leaf.shape, leaf.stride())
        return copied.copy_(leaf.detach(), non_blocking=True)


def is_staged(leaf: torch.Tensor) -> bool:
    """Return whether an input is copied while a step runs.

    Copies from pageable memory are not asynchronous, and tensors with gaps are gathered on the host
    first.

    >>> is_staged(torch.ones(100))
    False
    """
    return leaf.nbytes >= MIN_BYTES and leaf.is_pinned() and _launch.is_dense(leaf)
