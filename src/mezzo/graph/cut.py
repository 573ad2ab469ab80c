"""Which of the undecided ops run in 16 bits: the choice with the cheapest casts, by a minimum cut.

The 16-bit side is the source's, the float32 side the sink's. A value that is made in 16 bits and read in float32 anywhere pays one up-cast, however
many read it; one that is made in float32 and read in 16 bits pays one down-cast. Ties go to 16 bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mezzo.graph.flow import Network

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
    """The ops that read it in 16 bits as well when they run in float32, since their kernels promote."""
    up: float
    """What casting it to float32 costs, if it is made in 16 bits and read in float32."""
    down: float
    """What casting it to 16 bits costs, if it is made in float32 and read in 16 bits."""


def cheapest(values: Sequence[Value], pinned: Mapping[Hashable, bool]) -> dict[Hashable, bool]:
    """For each op that is not pinned, whether it runs in 16 bits; `pinned` holds the answer for the others.

    >>> cheapest([Value("linear", ("relu",), up=1, down=1), Value("relu", ("softmax",), up=1, down=1)], {"linear": True, "softmax": False})
    {'relu': True}
    """
    arcs = [arc for number, value in enumerate(values) for arc in _arcs(value, number, pinned)]
    free = {one: None for value in values for one in (value.maker, *value.readers, *value.promoting) if one not in pinned}
    chosen: dict[Hashable, bool] = {}
    for members, inside in _components(free, arcs):
        chosen |= _solve(members, inside)
    return {one: chosen[one] for one in free}


def price(values: Iterable[Value], halves: Mapping[Hashable, bool]) -> float:
    """What the casts of a complete choice cost."""
    ups = sum(value.up for value in values if halves[value.maker] and not all(halves[one] for one in value.readers))
    return ups + sum(value.down for value in values if not halves[value.maker] and any(halves[one] for one in (*value.readers, *value.promoting)))


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
        found += [(head, tail, capacity) for tail, head, capacity in _shared(maker, readers, _SOURCE, value.down, _Gadget(number, "down"))]
    return [arc for arc in found if arc[:2] not in ((_SOURCE, _SINK), (_SINK, _SOURCE))]


def _others(readers: Iterable[Hashable], maker: Hashable, pinned: Mapping[Hashable, bool]) -> list[Hashable]:
    placed = dict.fromkeys(_place(reader, pinned) for reader in readers)
    return [reader for reader in placed if reader != maker]


def _shared(maker: Hashable, readers: list[Hashable], terminal: _Terminal, capacity: float, gadget: _Gadget) -> list[_Arc]:
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


def _components(free: Iterable[Hashable], arcs: list[_Arc]) -> list[tuple[list[Hashable], list[_Arc]]]:
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
