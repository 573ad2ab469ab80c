"""Exchange a few numbers between the hosts of the ranks, without waiting for their devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from mezzo._torch import group_timeout


class HostGroup:
    """The hosts of the ranks of a process group. Every rank makes the same calls in order.

    An exchange is one small all-gather by gloo. It waits for the slowest host, not for work that
    was launched on devices.
    """

    def __init__(self, group: distributed.ProcessGroup | None, device: torch.device) -> None:
        self._parent, self._device = group, device
        self._group: distributed.ProcessGroup | None = None
        """The group on the host; it is created at the first exchange, by all ranks together."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return distributed.get_world_size(self._parent)

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of each rank; all ranks pass equally many."""
        if self.size == 1:
            return [tuple(numbers)]
        if self._group is None:
            self._group = self._create()
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(gathered, own, group=self._group)
        return [tuple(one.tolist()) for one in gathered]

    def _create(self) -> distributed.ProcessGroup:
        parent = distributed.group.WORLD if self._parent is None else self._parent
        group: distributed.ProcessGroup = distributed.new_group(
            distributed.get_process_group_ranks(parent),
            # A rank that does not answer is an error as early as in the collectives of training.
            timeout=group_timeout(parent, self._device),
            backend="gloo",
            # Ranks outside the group take no part.
            use_local_synchronization=True,
        )
        return group
