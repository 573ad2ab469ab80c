"""Choose the cheapest set of casts: a minimum cut (Dinic) over bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

_TOLERANCE = 1e-12
"""How much of the largest capacity counts as nothing: costs may be measured times, and
subtracting those leaves dust."""


class Network:
    """A network of numbered nodes; arcs stand in pairs, so that an arc's reverse is its number with the last bit flipped."""

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._heads: list[int] = []
        self._left: list[float] = []
        self._dust = 0.0

    def connect(self, tail: int, head: int, capacity: float) -> None:
        """Add an arc."""
        for one, other, left in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[one].append(len(self._heads))
            self._heads.append(other)
            self._left.append(left)
        if capacity != float("inf"):
            self._dust = max(self._dust, capacity * _TOLERANCE)

    def maximize(self, source: int, sink: int) -> float:
        """Push as much as the network carries from the source to the sink."""
        total: float = 0
        while (levels := self._levels(source, sink))[sink] >= 0:
            unused = [0] * len(self._arcs)
            while pushed := self._push(source, sink, levels, unused):
                total += pushed
        return total

    def reaching(self, sink: int) -> list[bool]:
        """Which nodes could still send something to the sink; after `maximize` the others are the largest source side that a minimum cut can have."""
        seen = [False] * len(self._arcs)
        seen[sink] = True
        waiting = deque([sink])
        while waiting:
            for arc in self._arcs[waiting.popleft()]:
                tail = self._heads[arc]
                if not seen[tail] and self._left[arc ^ 1] > self._dust:
                    seen[tail] = True
                    waiting.append(tail)
        return seen

    def _levels(self, source: int, sink: int) -> list[int]:
        levels = [-1] * len(self._arcs)
        levels[source] = 0
        waiting = deque([source])
        while waiting and levels[sink] < 0:
            node = waiting.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if levels[head] < 0 and self._left[arc] > self._dust:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _push(self, source: int, sink: int, levels: list[int], unused: list[int]) -> float:
        """Push along one shortest path; `unused` remembers for each node the first arc that may still lead on."""
        path: list[int] = []
        node = source
        while node != sink:
            arc = self._advance(node, levels, unused)
            if arc is not None:
                path.append(arc)
                node = self._heads[arc]
            elif path:
                node = self._heads[path.pop() ^ 1]
                unused[node] += 1
            else:
                return 0
        amount = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= amount
            self._left[arc ^ 1] += amount
        return amount

    def _advance(self, node: int, levels: list[int], unused: list[int]) -> int | None:
        arcs = self._arcs[node]
        while unused[node] < len(arcs):
            arc = arcs[unused[node]]
            if self._left[arc] > self._dust and levels[self._heads[arc]] == levels[node] + 1:
                return arc
            unused[node] += 1
        return None


_INFINITE = float("inf")


class _Terminal(Enum):
    SOURCE = "source"
    SINK = "sink"


_SOURCE, _SINK = _Terminal.SOURCE, _Terminal.SINK


@dataclass(frozen=True)
class Value:
    """A tensor that one op makes and others read."""

    maker: Hashable
    """The op that makes it."""
    readers: tuple[Hashable, ...]
    """The ops that read it in their own precision."""
    promoting: tuple[Hashable, ...] = field(default=(), kw_only=True)
    """The ops that read it in 16 bits as well when they run in float32, since their kernels
    promote."""
    up: float
    """What casting it to float32 costs, if it is made in 16 bits and read in float32."""
    down: float
    """What casting it to 16 bits costs, if it is made in float32 and read in 16 bits."""


def minimum_cut(values: Sequence[Value], pinned: Mapping[Hashable, bool]) -> dict[Hashable, bool]:
    """For each op that is not pinned, whether it runs in 16 bits; `pinned` holds the answer for the others.

    >>> minimum_cut([Value("linear", ("relu",), up=1, down=1), Value("relu", ("softmax",), up=1, down=1)], {"linear": True, "softmax": False})
    {'relu': True}
    """
    arcs = [arc for number, value in enumerate(values) for arc in _arcs(value, number, pinned)]
    free = {
        one: None
        for value in values
        for one in (value.maker, *value.readers, *value.promoting)
        if one not in pinned
    }
    chosen: dict[Hashable, bool] = {}
    for members, inside in _components(free, arcs):
        chosen |= _solve(members, inside)
    return {one: chosen[one] for one in free}


def cast_cost_of(values: Iterable[Value], halves: Mapping[Hashable, bool]) -> float:
    """What the casts of a complete choice cost."""
    ups = sum(
        value.up
        for value in values
        if halves[value.maker] and not all(halves[one] for one in value.readers)
    )
    return ups + sum(
        value.down
        for value in values
        if not halves[value.maker]
        and any(halves[one] for one in (*value.readers, *value.promoting))
    )


_Arc = tuple[Hashable, Hashable, float]


@dataclass(frozen=True)
class _Gadget:
    """A node of the network that stands for one shared cast."""

    number: int
    direction: str


def _arcs(value: Value, number: int, pinned: Mapping[Hashable, bool]) -> list[_Arc]:
    """The arcs of one value. A pinned op is the source or the sink itself, so that the network falls apart at it."""
    maker = _place(value.maker, pinned)
    strict = _others(value.readers, maker, pinned)
    readers = _others((*value.readers, *value.promoting), maker, pinned)
    found: list[_Arc] = []
    if maker != _SINK:
        found += _shared(maker, strict, _SINK, value.up, _Gadget(number, "up"))
    if maker != _SOURCE:
        found += [
            (head, tail, capacity)
            for tail, head, capacity in _shared(
                maker, readers, _SOURCE, value.down, _Gadget(number, "down")
            )
        ]
    return [arc for arc in found if arc[:2] not in ((_SOURCE, _SINK), (_SINK, _SOURCE))]


def _others(
    readers: Iterable[Hashable], maker: Hashable, pinned: Mapping[Hashable, bool]
) -> list[Hashable]:
    placed = dict.fromkeys(_place(reader, pinned) for reader in readers)
    return [reader for reader in placed if reader != maker]


def _shared(
    maker: Hashable, readers: list[Hashable], terminal: _Terminal, capacity: float, gadget: _Gadget
) -> list[_Arc]:
    opposite = _SOURCE if terminal == _SINK else _SINK
    readers = [reader for reader in readers if reader != opposite]
    if not readers:
        return []
    if terminal in readers:
        # One pinned reader needs the cast already; for the others it is free.
        return [(maker, terminal, capacity)]
    if len(readers) == 1:
        return [(maker, readers[0], capacity)]
    return [(maker, gadget, capacity), *((gadget, reader, _INFINITE) for reader in readers)]


def _place(one: Hashable, pinned: Mapping[Hashable, bool]) -> Hashable:
    return one if one not in pinned else _SOURCE if pinned[one] else _SINK


def _components(
    free: Iterable[Hashable], arcs: list[_Arc]
) -> list[tuple[list[Hashable], list[_Arc]]]:
    """The parts of the network that only the source and the sink connect."""
    leader: dict[Hashable, Hashable] = {}

    def find(one: Hashable) -> Hashable:
        root = one
        while (above := leader.setdefault(root, root)) != root:
            root = above
        while leader[one] != root:
            leader[one], one = root, leader[one]
        return root

    for tail, head, _ in arcs:
        if tail not in (_SOURCE, _SINK) and head not in (_SOURCE, _SINK):
            leader[find(tail)] = find(head)
    parts: dict[Hashable, tuple[list[Hashable], list[_Arc]]] = {}
    for one in free:
        parts.setdefault(find(one), ([], []))[0].append(one)
    for arc in arcs:
        inner = arc[0] if arc[0] not in (_SOURCE, _SINK) else arc[1]
        parts.setdefault(find(inner), ([], []))[1].append(arc)
    return list(parts.values())


def _solve(members: list[Hashable], arcs: list[_Arc]) -> dict[Hashable, bool]:
    numbers: dict[Hashable, int] = {_SOURCE: 0, _SINK: 1}
    for one in (*members, *(end for arc in arcs for end in arc[:2])):
        numbers.setdefault(one, len(numbers))
    network = Network(len(numbers))
    for tail, head, capacity in arcs:
        network.connect(numbers[tail], numbers[head], capacity)
    network.maximize(0, 1)
    reaching = network.reaching(1)
    return {one: not reaching[numbers[one]] for one in members}
