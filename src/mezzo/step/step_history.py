"""History of steps: a ring of their metrics that each step writes without synchronizing."""

from __future__ import annotations

from enum import IntEnum
from math import nan

import torch

from mezzo._torch import DisableTorchDispatch
from mezzo.scaling.gradient_counts import GradientCounts

ROWS = 8192
"""Steps that the ring holds; the host takes them out long before."""
_BLOCK = 2560
"""Rows that are copied out of the ring at a time."""
NO_UPDATE = -1.0
"""`SKIPPED` of a call that only accumulated gradients."""


class HistoryIndex(IntEnum):
    """Positions of the numbers in a row, for the kernel too."""

    NUMBER = 0
    """Number of the call since the history was attached, from 1. A flush counts as a call."""
    LOSS = 1
    """The loss, if `HAS_LOSS`."""
    SKIPPED = 2
    """1 if the update was skipped, 0 if it was applied; else `NO_UPDATE`."""
    SCALE = 3
    """Loss scale after the step; NaN if it did not change."""
    NORM = 4
    """Norm of the unscaled gradients; NaN if it is not computed."""
    FIRST = 5
    """The first parameter with a non-finite gradient, for `GradientCounts.first_parameter`."""
    HAS_LOSS = 6
    """1 if the call computed a loss, else 0."""


class StepHistory:
    """Rows of metrics in pinned memory, one for each call of a step.

    On CUDA the kernel that writes the metrics of a step writes its row too: nothing synchronizes,
    and nothing is launched for it. The host takes the rows that have arrived.

    >>> history = StepHistory(torch.device("cpu"))
    >>> history.append(torch.tensor(0.5), 0.0, 8.0, None)
    >>> history.take(all_arrived=True).tolist()
    [[1.0, 0.5, 0.0, 8.0, nan, 0.0, 1.0]]
    """

    def __init__(
        self, device: torch.device, counts: GradientCounts | None = None, rows: int = ROWS
    ) -> None:
        self.counts = counts
        """Counts of the gradients, whose first bad parameter goes into the rows."""
        self.rows = torch.zeros(
            rows, len(HistoryIndex), dtype=torch.float64, pin_memory=device.type == "cuda"
        )
        """float64 [rows, numbers of a row]."""
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        """Number of the last row that a kernel has written."""
        self._device, self._is_pinned = device, device.type == "cuda"
        self._appended = self._taken = 0

    def append(
        self,
        loss: torch.Tensor | None,
        skipped: torch.Tensor | float,
        scale: torch.Tensor | float,
        norm: torch.Tensor | None,
    ) -> None:
        """Write a row with ops of torch, which no mode sees. Does not synchronize."""
        with DisableTorchDispatch():
            self._append(loss, skipped, scale, norm)

    def _append(
        self,
        loss: torch.Tensor | None,
        skipped: torch.Tensor | float,
        scale: torch.Tensor | float,
        norm: torch.Tensor | None,
    ) -> None:
        first = 0.0 if self.counts is None else self.counts.first.clone()
        if self.counts is not None:
            self.counts.first.zero_()
        index = self._appended % len(self.rows)
        self._appended += 1
        values = (self._appended, loss, skipped, scale, norm, first, float(loss is not None))
        row = torch.stack([self._number(nan if value is None else value) for value in values])
        self.rows[index].copy_(row, non_blocking=self._is_pinned)

    def _number(self, value: torch.Tensor | float) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            number = value.detach().reshape(()).double()
            return number.to(self._device, non_blocking=self._device.type != "cpu")
        # A fill: a copy from the host would synchronize.
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def take(self, *, all_arrived: bool) -> torch.Tensor:
        """Return a copy of the rows that have arrived since the last call, in order.

        Unless `all_arrived`, which is after a synchronization, the newest row is left for the next
        call: the device may be writing it. Rows that were overwritten are missing.
        """
        blocks, position, end = [], self._taken, self._taken + len(self.rows)
        while position < end:
            place = position % len(self.rows)
            block = self.rows[place : place + min(_BLOCK, end - position)].clone()
            old = (block[:, 0] <= self._taken).nonzero()
            count = int(old[0]) if len(old) else len(block)
            blocks.append(block[:count])
            position += count
            if count < len(block):
                break
        # A copy: a view of a block would keep all of its memory.
        fresh = torch.cat(blocks)
        if position == end:
            # The ring was overwritten: its first row need not be the oldest.
            fresh = fresh[fresh[:, 0].argsort()]
            position = int(fresh[-1, 0])
        if position > self._taken and not all_arrived:
            fresh, position = fresh[:-1], position - 1
        self._taken = position
        return fresh
