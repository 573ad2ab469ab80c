"""Choose the cheapest set of casts: a minimum cut (Dinic) over bytes cast.

Each op is on the source side (16 bits) or on the sink side (float32). An arc between two ops has
the cost of the cast that is needed if they are on different sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

_INFINITE = float("inf")

_TOLERANCE = 1e-12
"""Share of the largest capacity that counts as zero: costs may be measured times, and subtracting
those leaves rounding errors."""


class _Terminal(Enum):
    """The two ends of the flow network."""

    SOURCE = "source"
    SINK = "sink"


_SOURCE, _SINK = _Terminal.SOURCE, _Terminal.SINK


@dataclass(frozen=True)
class Value:
    """A tensor that one op produces and others read."""

    producer: Hashable
    """The op that produces it."""
    readers: tuple[Hashable, ...]
    """The ops that read it in their own precision."""
    promoting: tuple[Hashable, ...] = field(default=(), kw_only=True)
    """The ops that can read it in 16 bits although they run in float32, since their kernels
    promote."""
    up: float
    """Cost of casting it to float32, if it is produced in 16 bits and read in float32."""
    down: float
    """Cost of casting it to 16 bits, if it is produced in float32 and read in 16 bits."""


def minimum_cut(values: Sequence[Value], fixed: Mapping[Hashable, bool]) -> dict[Hashable, bool]:
    """Return for each op that is not in `fixed` whether it runs in 16 bits.

    `fixed` holds the same for the other ops. Among equally cheap choices, the one with the most ops
    in 16 bits is returned.

    >>> values = [
    ...     Value("linear", ("relu",), up=1, down=1),
    ...     Value("relu", ("softmax",), up=1, down=1),
    ... ]
    >>> minimum_cut(values, {"linear": True, "softmax": False})
    {'relu': True}
    """
    arcs = [arc for number, value in enumerate(values) for arc in _arcs(value, number, fixed)]
    free = {
        node: None
        for value in values
        for node in (value.producer, *value.readers, *value.promoting)
        if node not in fixed
    }
    chosen: dict[Hashable, bool] = {}
    for members, inside in _components(free, arcs):
        chosen |= _solve(members, inside)
    return {node: chosen[node] for node in free}


# From values to arcs

_Arc = tuple[Hashable, Hashable, float]
"""Tail, head and capacity."""


@dataclass(frozen=True)
class _SharedCast:
    """A node of the network that stands for one cast that several readers share."""

    number: int
    direction: str


def _arcs(value: Value, number: int, fixed: Mapping[Hashable, bool]) -> list[_Arc]:
    """Return the arcs of one value.

    A fixed op is merged into the source or the sink, so that the network splits there into
    independent components.
    """
    producer = _terminal_or_op(value.producer, fixed)
    strict = _others(value.readers, producer, fixed)
    readers = _others((*value.readers, *value.promoting), producer, fixed)
    arcs: list[_Arc] = []
    if producer != _SINK:
        arcs += _cast_arcs(producer, strict, _SINK, value.up, _SharedCast(number, "up"))
    if producer != _SOURCE:
        arcs += [
            (head, tail, capacity)
            for tail, head, capacity in _cast_arcs(
                producer, readers, _SOURCE, value.down, _SharedCast(number, "down")
            )
        ]
    return [arc for arc in arcs if arc[:2] not in ((_SOURCE, _SINK), (_SINK, _SOURCE))]


def _terminal_or_op(op: Hashable, fixed: Mapping[Hashable, bool]) -> Hashable:
    return op if op not in fixed else _SOURCE if fixed[op] else _SINK


def _others(
    readers: Iterable[Hashable], producer: Hashable, fixed: Mapping[Hashable, bool]
) -> list[Hashable]:
    merged = dict.fromkeys(_terminal_or_op(reader, fixed) for reader in readers)
    return [reader for reader in merged if reader != producer]


def _cast_arcs(
    producer: Hashable,
    readers: list[Hashable],
    terminal: _Terminal,
    capacity: float,
    shared: _SharedCast,
) -> list[_Arc]:
    opposite = _SOURCE if terminal == _SINK else _SINK
    readers = [reader for reader in readers if reader != opposite]
    if not readers:
        return []
    if terminal in readers:
        # One fixed reader needs the cast already; for the others it is free.
        return [(producer, terminal, capacity)]
    if len(readers) == 1:
        return [(producer, readers[0], capacity)]
    return [(producer, shared, capacity), *((shared, reader, _INFINITE) for reader in readers)]


# Solve each component


def _components(
    free: Iterable[Hashable], arcs: list[_Arc]
) -> list[tuple[list[Hashable], list[_Arc]]]:
    """Split the network into the parts that are connected only through the source and the sink."""
    leader: dict[Hashable, Hashable] = {}

    def find(member: Hashable) -> Hashable:
        root = member
        while (above := leader.setdefault(root, root)) != root:
            root = above
        while leader[member] != root:
            leader[member], member = root, leader[member]
        return root

    for tail, head, _ in arcs:
        if tail not in (_SOURCE, _SINK) and head not in (_SOURCE, _SINK):
            leader[find(tail)] = find(head)
    parts: dict[Hashable, tuple[list[Hashable], list[_Arc]]] = {}
    for node in free:
        parts.setdefault(find(node), ([], []))[0].append(node)
    for arc in arcs:
        inner = arc[0] if arc[0] not in (_SOURCE, _SINK) else arc[1]
        parts.setdefault(find(inner), ([], []))[1].append(arc)
    return list(parts.values())


def _solve(members: list[Hashable], arcs: list[_Arc]) -> dict[Hashable, bool]:
    numbers: dict[Hashable, int] = {_SOURCE: 0, _SINK: 1}
    for end_node in (*members, *(end for arc in arcs for end in arc[:2])):
        numbers.setdefault(end_node, len(numbers))
    network = FlowNetwork(len(numbers))
    for tail, head, capacity in arcs:
        network.add_arc(numbers[tail], numbers[head], capacity)
    network.max_flow(0, 1)
    on_sink_side = network.can_reach(1)
    return {member: not on_sink_side[numbers[member]] for member in members}


class FlowNetwork:
    """A flow network of numbered nodes, solved with Dinic's algorithm.

    Arcs are stored in pairs: the reverse of an arc has its number with the last bit flipped.
    """

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._heads: list[int] = []
        self._residual: list[float] = []
        self._epsilon = 0.0

    def add_arc(self, tail: int, head: int, capacity: float) -> None:
        """Add an arc and its reverse."""
        for one, other, residual in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[one].append(len(self._heads))
            self._heads.append(other)
            self._residual.append(residual)
        if capacity != _INFINITE:
            self._epsilon = max(self._epsilon, capacity * _TOLERANCE)

    def max_flow(self, source: int, sink: int) -> float:
        """Push the maximum flow from the source to the sink; return its size."""
        total: float = 0
        while (levels := self._levels(source, sink))[sink] >= 0:
            next_arc = [0] * len(self._arcs)
            while pushed := self._push(source, sink, levels, next_arc):
                total += pushed
        return total

    def can_reach(self, sink: int) -> list[bool]:
        """Return which nodes still have a path of residual capacity to the sink.

        After `max_flow`, the others are the largest source side that a minimum cut can have.
        """
        seen = [False] * len(self._arcs)
        seen[sink] = True
        waiting = deque([sink])
        while waiting:
            for arc in self._arcs[waiting.popleft()]:
                tail = self._heads[arc]
                if not seen[tail] and self._residual[arc ^ 1] > self._epsilon:
                    seen[tail] = True
                    waiting.append(tail)
        return seen

    def _levels(self, source: int, sink: int) -> list[int]:
        """Return the distance of each node from the source, -1 where there is no path."""
        levels = [-1] * len(self._arcs)
        levels[source] = 0
        waiting = deque([source])
        while waiting and levels[sink] < 0:
            node = waiting.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if levels[head] < 0 and self._residual[arc] > self._epsilon:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _push(self, source: int, sink: int, levels: list[int], next_arc: list[int]) -> float:
        """Push along one shortest path; `next_arc` holds for each node the first arc to try."""
        path: list[int] = []
        node = source
        while node != sink:
            arc = self._advance(node, levels, next_arc)
            if arc is not None:
                path.append(arc)
                node = self._heads[arc]
            elif path:
                node = self._heads[path.pop() ^ 1]
                next_arc[node] += 1
            else:
                return 0
        amount = min(self._residual[arc] for arc in path)
        for arc in path:
            self._residual[arc] -= amount
            self._residual[arc ^ 1] += amount
        return amount

    def _advance(self, node: int, levels: list[int], next_arc: list[int]) -> int | None:
        arcs = self._arcs[node]
        while next_arc[node] < len(arcs):
            arc = arcs[next_arc[node]]
            if self._residual[arc] > self._epsilon and levels[self._heads[arc]] == levels[node] + 1:
                return arc
            next_arc[node] += 1
        return None
