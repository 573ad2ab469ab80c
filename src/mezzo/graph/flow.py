"""Maximum flow, and the minimum cut that it proves: Dinic's algorithm with loops in place of recursion.

Source: E. A. Dinic, Algorithm for solution of a problem of maximum flow in networks with power estimation, 1970.
"""

from __future__ import annotations

from collections import deque

_TOLERANCE = 1e-12
"""How much of the largest capacity counts as nothing: costs may be measured times, and subtracting those leaves dust."""


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
