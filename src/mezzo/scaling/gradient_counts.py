"""Count what overflows and underflows in each gradient, in the pass that checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mezzo import _launch
from mezzo._torch import DisableTorchDispatch

_ROOM = 16
"""Slots for each parameter: a new list of gradients takes new slots, and lists repeat."""
_LAST = 2**31 - 1


class Counts(NamedTuple):
    """Values of one gradient, added up over steps. Gradients are counted scaled, as they arrive."""

    overflowed: int
    """Values that are NaN or infinite."""
    underflowed: int
    """Values below the smallest normal number of the gradient's dtype, including zeros: they have
    lost digits, or all of them."""
    zeros: int
    """Values that are zero, whether they underflowed or not."""
    total: int
    """All values."""

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts(*(one + more for one, more in zip(self, other, strict=True)))

    def minus(self, other: Counts) -> Counts:
        """Return the differences."""
        return Counts(*(one - less for one, less in zip(self, other, strict=True)))


class CountedGradients(NamedTuple):
    """Where the counts of the gradients of one launch go: consecutive rows, in their order."""

    memory: torch.Tensor
    first_slot: int

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        """Count gradients with torch ops where there is no kernel, hidden from dispatch modes."""
        with DisableTorchDispatch():
            self._add(gradients)

    def _add(self, gradients: Sequence[torch.Tensor]) -> None:
        totals = _launch.table_on(
            self.memory.device, torch.tensor([gradient.numel() for gradient in gradients])
        )
        finite, small, used = torch.stack([_counts_of(gradient) for gradient in gradients]).unbind(
            1
        )
        rows = torch.stack([totals - finite, small, totals - used, totals], 1)
        self.memory[self.first_slot : self.first_slot + len(gradients)] += rows
        places = _LAST - self.first_slot - torch.arange(len(gradients), device=rows.device)
        bad = torch.where(rows[:, 0] > 0, places, 0).amax()
        torch.maximum(self.memory[0, 0], bad, out=self.memory[0, 0])


class GradientCounts:
    """Counts of the gradients of some parameters, on their device.

    The memory is allocated once, so that a captured step can write to it. Row 0 holds the first
    parameter with a non-finite gradient, each further row the `Counts` of a gradient.

    >>> weight = torch.ones(4)
    >>> counts = GradientCounts([weight])
    >>> counts.of([weight]).add([torch.tensor([0.0, 1e-6, 1.0, torch.inf], dtype=torch.float16)])
    >>> counts.by_parameter(counts.used().tolist())[0]
    Counts(overflowed=1, underflowed=2, zeros=1, total=4)
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        """The parameters in the order in which they are counted."""
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.memory = torch.zeros(
            1 + _ROOM * len(self.parameters), 4, dtype=torch.int64, device=parameters[0].device
        )
        """int64 [slots, 4]."""
        self._slots: dict[tuple[int, ...], int] = {}
        self._owners: list[int] = [-1]
        """Index of the parameter of each slot in use."""

    @property
    def first(self) -> torch.Tensor:
        """The first parameter with a non-finite gradient, for `first_parameter`; 0 for none.

        Whatever reads it sets it to 0 again.
        """
        return self.memory[0, 0]

    def of(self, owners: Sequence[torch.Tensor]) -> CountedGradients | None:
        """Return where to count the gradients of these parameters; None if they are not counted.

        They are not counted if some of them are unknown here, if one is on another device, or if
        more lists of parameters had gradients than there is room for. Of sharded parameters, the
        shards of this process count.
        """
        key = tuple(map(id, owners))
        first_slot = self._slots.get(key)
        if first_slot is None:
            first_slot = len(self._owners)
            if first_slot + len(owners) > len(self.memory) or not all(map(self._takes, owners)):
                return None
            self._slots[key] = first_slot
            self._owners += [self._index[parameter_id] for parameter_id in key]
        return CountedGradients(self.memory, first_slot)

    def _takes(self, owner: torch.Tensor) -> bool:
        return id(owner) in self._index and owner.device == self.memory.device

    def used(self) -> torch.Tensor:
        """Return the part of the memory that is in use, for a copy to the host."""
        return self.memory[: len(self._owners)]

    def by_parameter(self, rows: list[list[int]]) -> dict[int, Counts]:
        """Return the counts of each parameter, by its index, from a copy of `used()`."""
        counts: dict[int, Counts] = {}
        for owner, row in zip(self._owners[1:], rows[1:], strict=False):
            counts[owner] = counts.get(owner, _NONE).plus(Counts(*map(int, row)))
        return counts

    def first_parameter(self, first: float) -> int | None:
        """Return the index of the first parameter from the value of `first`, None if it is 0."""
        slot = _LAST - int(first)
        return self._owners[slot] if first and slot < len(self._owners) else None


_NONE = Counts(0, 0, 0, 0)


def _counts_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return how many values are finite, how many underflow and how many are not zero."""
    magnitude = gradient.abs()
    is_small = magnitude < torch.finfo(gradient.dtype).smallest_normal
    return torch.stack([(magnitude < torch.inf).sum(), is_small.sum(), magnitude.count_nonzero()])
