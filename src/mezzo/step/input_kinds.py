"""Kinds of inputs that a step was called with, and for which of them graphs are kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from mezzo._errors import PolicyError
from mezzo.step.replay_timing import ReplayTiming

Graph = TypeVar("Graph")
MAX_GRAPHS = 64
"""Kinds of inputs that graphs are kept for, unless the user sets another number."""
SMALL = 0.3
"""A new kind of up to this share of the largest captured one runs eagerly without dropping
graphs."""
REMEMBERED = 1024
"""Kinds that are remembered; inputs that contain a changing number make a new one each call."""


@dataclass(eq=False)
class InputKind(Generic[Graph]):
    """Inputs that one graph can run: equal shapes, dtypes, nesting and plain values.

    Calls that accumulate gradients have a graph for each of their phases.
    """

    last_use: int = 0
    """Number of the call that used it last."""
    previous_use: int = 0
    """Number of the call that used it before that; 0 if there was none."""
    size: int = 0
    """Bytes of the inputs."""
    was_captured: bool = False
    """Whether it had a graph."""
    is_eager: bool = False
    """Whether its calls run eagerly: they cannot be captured, or replays were slower."""
    timings: dict[Hashable, ReplayTiming] = field(default_factory=dict)
    """Durations of its eager calls and first replays; there is one after the first eager call."""
    host_reads: dict[Hashable, list[str]] = field(default_factory=dict)
    """Lines that read from the device in its last eager call, if ranks have to agree on them."""
    graphs: dict[Hashable, Graph] = field(default_factory=dict)
    """Its captured graphs."""

    def note_use(self, call: int) -> None:
        """Note that the call with this number uses it."""
        self.previous_use, self.last_use = self.last_use, call

    def add_graph(self, place: Hashable, graph: Graph) -> None:
        """Keep a graph of its calls."""
        self.graphs[place], self.was_captured = graph, True

    def leave_eager(self, *slower: Hashable) -> None:
        """Run its calls eagerly from now on, without the graphs whose replays were slower."""
        for place in slower:
            del self.graphs[place]
        self.is_eager = True


class InputKinds(Generic[Graph]):
    """The kinds of inputs so far. Graphs are kept for a limited number of them.

    When there is no room, the least recently used kind is dropped for one that was used twice since
    then. So inputs that alternate do not evict each other in every call.

    >>> kinds: InputKinds[str] = InputKinds(1)
    >>> first = kinds.use("first", [torch.ones(2)])
    >>> kinds.has_room(first), first.size
    (True, 8)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kinds: dict[Hashable, InputKind[Graph]] = {}
        self._calls = 0
        self._last_new = 0
        """Number of the last call that used a new kind."""

    def use(
        self, key: Hashable, leaves: Sequence[torch.Tensor], size: int | None = None
    ) -> InputKind[Graph]:
        """Return the kind with this key, which the current call uses.

        `size` replaces the bytes of the leaves.
        """
        self._calls += 1
        kind = self._kinds.get(key)
        if kind is None:
            self._forget()
            size = sum(leaf.nbytes for leaf in leaves) if size is None else size
            kind = self._kinds[key] = InputKind(size=size)
            self._last_new = self._calls
        kind.note_use(self._calls)
        return kind

    def _forget(self) -> None:
        """Forget the least recently used kind without graphs, if there are too many kinds."""
        if len(self._kinds) >= REMEMBERED:
            without = [key for key, kind in self._kinds.items() if not kind.graphs]
            if without:
                del self._kinds[min(without, key=lambda key: self._kinds[key].last_use)]

    def needs_memory_of_graphs(self, kind: InputKind[Graph]) -> bool:
        """Return whether an eager call of a new kind needs the memory of the graphs.

        The memory of graphs stays reserved in addition to that of the call.
        """
        return kind.last_use == self._last_new == self._calls and kind.size > SMALL * max(
            (other.size for other in self._kinds.values() if other.graphs), default=kind.size
        )

    @property
    def are_settled(self) -> bool:
        """Whether enough calls have passed since the last new kind, which may evict graphs."""
        return self._calls - self._last_new >= len(self._kinds) // 10

    def has_room(self, kind: InputKind[Graph]) -> bool:
        """Return whether graphs of a kind can be kept, possibly in place of another kind's."""
        oldest = self._oldest_if_full()
        return oldest is None or kind.previous_use > oldest.last_use

    def make_room(self) -> None:
        """Drop the graphs of the least recently used kind, if there are too many."""
        oldest = self._oldest_if_full()
        if oldest is not None:
            oldest.graphs.clear()

    def _oldest_if_full(self) -> InputKind[Graph] | None:
        captured = [kind for kind in self._kinds.values() if kind.graphs]
        if len(captured) < self.limit:
            return None
        return min(captured, key=lambda kind: kind.last_use)

    def is_largest(self, kind: InputKind[Graph]) -> bool:
        """Return whether a kind is larger than all that have graphs.

        Captured last, it would need new memory in addition to theirs; captured first, its memory
        serves them all.
        """
        sizes = [other.size for other in self._kinds.values() if other.graphs]
        return bool(sizes) and kind.size > max(sizes)

    @property
    def exceed_limit(self) -> bool:
        """Whether there are more kinds than graphs can be kept for."""
        return len(self._kinds) > self.limit

    def is_new_beyond_limit(self, kind: InputKind[Graph]) -> bool:
        """Return whether a kind is used for the first time, and there are too many already."""
        return self.exceed_limit and not kind.previous_use

    def are_others_captured(self, kind: InputKind[Graph]) -> bool:
        """Return whether other kinds have graphs, or had them and will be captured again."""
        others = (other for other in self._kinds.values() if other is not kind)
        return any(other.was_captured and not other.is_eager for other in others)

    @property
    def has_graphs(self) -> bool:
        """Whether any kind has graphs."""
        return any(kind.graphs for kind in self._kinds.values())

    @property
    def graph_count(self) -> int:
        """Kinds that have graphs."""
        return sum(bool(kind.graphs) for kind in self._kinds.values())

    def drop_graphs(self) -> None:
        """Drop all graphs, and keep what is known about the kinds."""
        for kind in self._kinds.values():
            kind.graphs.clear()

    def clear(self) -> None:
        """Forget all kinds."""
        self._kinds.clear()


def check_max_graphs(max_graphs: int) -> int:
    """Return the number of kinds of inputs that are captured; raise `PolicyError` unless it is."""
    if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 1:
        raise PolicyError(
            f"max_graphs={max_graphs!r} is not a number of captured graphs. Pass an integer of 1 or"
            " more, or capture=False for none."
        )
    return max_graphs
