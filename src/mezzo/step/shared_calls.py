"""Agree with the other ranks how a call runs, before anything is launched.

A captured graph holds collectives. NCCL requires that all ranks capture them in the same call, and
replay the graphs of one capture together. So each rank numbers the kinds of its inputs, and the
numbers of all ranks are the kind of a call: from the same kinds, all ranks choose alike whether to
run eagerly, to capture or to replay. What a rank finds by itself (inputs that cannot be captured,
graphs that it had to drop, a capture that failed) is exchanged as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import distributed

from mezzo.parallel.process_groups import HostGroup
from mezzo.scaling.mesh import mesh_of
from mezzo.step.components import StepComponents
from mezzo.step.cuda_graph import CaptureFailed, HostDrawsFound
from mezzo.step.input_kinds import REMEMBERED

_REFUSED = -1
"""Number of inputs that cannot be captured."""
_DONE, _DRAWS, _FAILED = range(3)
"""Outcomes of a capture; the largest of all ranks counts."""


class CallState(NamedTuple):
    """What one rank contributes to the agreement about a call."""

    key: Hashable | None
    """The kind of its inputs; None if they cannot be captured."""
    size: int
    """Bytes of its inputs."""
    is_ready: bool
    """Whether it could capture the call."""
    has_dropped: bool
    """Whether it has dropped its graphs since the last call."""


class SharedCall(NamedTuple):
    """What all ranks have agreed about a call."""

    key: Hashable
    """The kinds of the inputs of all ranks."""
    size: int
    """Bytes of the largest inputs."""
    is_ready: bool
    """Whether all ranks can capture the call."""
    drops: bool
    """Whether all ranks drop their graphs first, since one of them has."""
    refusal: str | None
    """Why the call cannot be captured, if some rank has inputs that cannot."""


class SharedCalls:
    """The calls of a step that several ranks run together."""

    def __init__(self, hosts: HostGroup, *, same_shapes: bool = False) -> None:
        self._hosts = hosts
        self._same_shapes = same_shapes
        """Whether the user has promised that kinds are equal on all ranks: none are exchanged."""
        self._numbers: dict[Hashable, int] = {}
        self._count = 0

    def agree(self, state: CallState) -> SharedCall:
        """Exchange what the ranks would do in this call. Does not wait for devices."""
        own = (self._number(state.key), state.size, state.is_ready, state.has_dropped)
        rows = [own] if self._same_shapes else self._hosts.gather(own)
        numbers, sizes, ready, dropped = zip(*rows, strict=True)
        refusing = [rank for rank, number in enumerate(numbers) if number == _REFUSED]
        refusal = on_other_ranks(refusing) if refusing else None
        return SharedCall(numbers, max(sizes), all(ready), any(dropped), refusal)

    def _number(self, key: Hashable | None) -> int:
        """Return the number of a kind on this rank; a number never has another meaning."""
        if key is None:
            return _REFUSED
        if key not in self._numbers:
            if len(self._numbers) >= REMEMBERED:
                self._numbers.clear()
            self._numbers[key] = self._count
            self._count += 1
        return self._numbers[key]

    def agree_on_reads(self, lines: Sequence[str]) -> CaptureFailed | None:
        """Return why a call is not captured: ranks read from their devices in different lines.

        A capture would fail on some of them only, and others might wait for those in NCCL, which
        prepares collectives with its peers while they are captured.
        """
        # Without folders, which may differ between machines.
        text = "\n".join(sorted({line.rpartition("/")[2] for line in lines}))
        digest = hashlib.sha256(text.encode()).digest()[:8]
        rows = self._hosts.gather([int.from_bytes(digest, signed=True)])
        if all(row == rows[0] for row in rows):
            return None
        here = f"in {lines[0]}" if lines else "nowhere"
        return CaptureFailed(
            f"the hosts of the ranks read from their devices in different lines, this one {here}"
        )

    def agree_on_capture(self, failure: CaptureFailed | None) -> CaptureFailed | None:
        """Return why the capture of a call failed on some rank; None if it failed on none."""
        own = (
            _DONE if failure is None else _DRAWS if isinstance(failure, HostDrawsFound) else _FAILED
        )
        outcomes = [row[0] for row in self._hosts.gather([own])]
        worst = max(outcomes)
        if own == worst:
            return failure
        if worst == _DRAWS:
            return HostDrawsFound()
        return CaptureFailed(on_other_ranks([i for i, one in enumerate(outcomes) if one == worst]))

    def agree_on_slower(self, *, slower: bool) -> bool:
        """Return whether replays take longer than eager calls on all ranks."""
        return all(row[0] for row in self._hosts.gather([slower]))


def on_other_ranks(ranks: Sequence[int]) -> str:
    """Name the ranks that prevent a capture.

    >>> on_other_ranks([1])
    'it cannot be captured on rank 1, whose warning states the reason'
    """
    if len(ranks) > 1:
        listed = ", ".join(map(str, ranks))
        return f"it cannot be captured on ranks {listed}, whose warnings state the reason"
    return f"it cannot be captured on rank {ranks[0]}, whose warning states the reason"


# -- ranks of a step -------------------------------------------------------------------------------


def process_groups(components: StepComponents) -> tuple[distributed.ProcessGroup | None, ...]:
    """Return the groups of the ranks that train together; none if this process trains alone.

    Collectives over all ranks run in one group after the other; None is the default group.
    """
    if components.replicas:
        return (components.replicas.group,)
    mesh = mesh_of([one for model in components.models for one in model.parameters()])
    return () if mesh is None else mesh.groups


def shared_calls(components: StepComponents, *, same_shapes: bool) -> SharedCalls | None:
    """Return the agreement about the calls of a step; None if this process trains alone."""
    groups = process_groups(components)
    if not groups:
        return None
    return SharedCalls(HostGroup(groups[0], components.device), same_shapes=same_shapes)


def do_all_capture(components: StepComponents, *, own: bool) -> bool:
    """Return whether the steps of all ranks are to be captured. Synchronizes."""
    flag = torch.tensor([own], dtype=torch.int32, device=components.device)
    for group in process_groups(components):
        distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=group)
    return bool(flag.item())
