"""Process groups: exchange numbers between hosts, compare settings of ranks, shut down.

An exchange between hosts does not wait for devices. Ranks that train with different settings drift
apart, or wait for each other for ever: they compare a hash once, before the first call of a step,
and the values themselves only if it differs.

NCCL waits at the end for all CUDA graphs that hold its collectives. A script that ends with
`torch.distributed.destroy_process_group()` has its training step in memory, and would not end: its
graphs are dropped before a group shuts down.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import distributed

from mezzo._errors import PolicyError
from mezzo._torch import group_timeout

_SHOWN = 5
"""Fields that a message lists."""
_WIDTH = 60
"""Characters of a value that a message shows."""
_HASH_BYTES = 8


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
        return [tuple(row.tolist()) for row in gathered]

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


# -- settings of ranks -----------------------------------------------------------------------------


def check_agreement(
    values: Mapping[str, str], group: distributed.ProcessGroup | None, device: torch.device
) -> None:
    """Raise `PolicyError` on all ranks of a group unless all of them have the same values.

    `values` are settings by name. Every rank of the group has to call this, and all of them get the
    same error. It is one collective of 16 bytes, and two more if something differs. Synchronizes.
    """
    if distributed.get_world_size(group) == 1:
        return
    encoded = json.dumps(dict(values)).encode()
    digest = hashlib.sha256(json.dumps(sorted(values.items())).encode()).digest()[:_HASH_BYTES]
    own = torch.tensor([int.from_bytes(digest, signed=True), len(encoded)], device=device)
    gathered = [row.tolist() for row in _all_gather(own, group)]
    if any(row != gathered[0] for row in gathered):
        padded = torch.zeros(max(length for _, length in gathered), dtype=torch.uint8)
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        texts = [bytes(row.tolist()) for row in _all_gather(padded.to(device), group)]
        by_rank = [
            json.loads(text[:length]) for text, (_, length) in zip(texts, gathered, strict=True)
        ]
        raise PolicyError(disagreement(by_rank))


def _all_gather(
    tensor: torch.Tensor, group: distributed.ProcessGroup | None
) -> Sequence[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, tensor, group=group)
    return gathered


def disagreement(by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Describe the fields that differ, with the ranks that have each value.

    >>> disagreement([{"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
    'The ranks train with different settings. dtype: float16 on ranks 0, 2; bfloat16 on rank 1. \
Create the step with the same arguments on all ranks.'
    """
    names = dict.fromkeys(name for values in by_rank for name in values)
    differing = [name for name in names if len({values.get(name) for values in by_rank}) > 1]
    lines = [f"{name}: {_by_value(name, by_rank)}" for name in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        lines.append(f"{len(differing) - _SHOWN} more fields differ")
    return (
        f"The ranks train with different settings. {'. '.join(lines)}. Create the step with the"
        " same arguments on all ranks."
    )


def _by_value(name: str, by_rank: Sequence[Mapping[str, Any]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, values in enumerate(by_rank):
        ranks.setdefault(values.get(name, "absent"), []).append(rank)
    return "; ".join(
        f"{value:.{_WIDTH}} on rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for value, own in ranks.items()
    )


# -- shutdown --------------------------------------------------------------------------------------


class GraphHolder(Protocol):
    """Holds captured graphs with collectives."""

    def drop_graphs(self) -> None:
        """Drop the graphs, after waiting for them."""


_holders: WeakSet[GraphHolder] = WeakSet()


def drop_before_shutdown(holder: GraphHolder) -> None:
    """Call `holder.drop_graphs()` before any process group shuts down. Keeps no reference."""
    _holders.add(holder)
    _extend_shutdown()


@cache
def _extend_shutdown() -> None:
    # The method, not `destroy_process_group`, which scripts may have imported by name.
    shutdown = distributed.ProcessGroup.shutdown

    @wraps(shutdown)
    def drop_and_shut_down(group: Any) -> None:
        for holder in list(_holders):
            holder.drop_graphs()
        shutdown(group)

    setattr(distributed.ProcessGroup, shutdown.__name__, drop_and_shut_down)
