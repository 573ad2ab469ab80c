"""Which nodes of a graph may be names of one memory, and which memory is written."""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from mezzo._torch import OpOverload
from mezzo.graph.nodes import base, bound, nodes_in
from mezzo.graph.traits import ALIASING, STATISTICS

_NORMS = frozenset({"batch_norm", "instance_norm"})


def alias_sets(graph: Graph) -> dict[Node, list[Node]]:
    """For each node the nodes that may share its memory, itself included, in the graph's order."""
    leader: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while leader.setdefault(node, node) is not node:
            node = leader[node]
        return node

    for node in graph.nodes:
        root = find(node)
        for shared in _shares(node):
            other = find(shared)
            if other is not root:
                leader[root] = other
                root = other
    sets: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        sets.setdefault(find(node), []).append(node)
    return {node: sets[find(node)] for node in graph.nodes}


def written(graph: Graph) -> frozenset[Node]:
    """Every node whose memory some op of the graph writes, under whichever name."""
    sets = alias_sets(graph)
    return frozenset(one for node in graph.nodes for target in writes(node) for one in sets[target])


def writes(node: Node) -> list[Node]:
    """The tensors that a node writes in place."""
    if not isinstance(node.target, OpOverload):
        return []
    writing = {argument.name for argument in node.target._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write}
    if base(node) in _NORMS:
        arguments = dict(bound(node))
        writing |= STATISTICS if arguments.get("training", arguments.get("use_input_stats")) else frozenset()
    return [one for name, value in bound(node) if name in writing for one in nodes_in(value)]


def _shares(node: Node) -> list[Node]:
    if node.target is operator.getitem:
        return list(nodes_in(node.args[0]))
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    if base(node) in ALIASING:
        return list(nodes_in(node.args[0]))
    if not any(one.alias_info is not None for one in schema.returns):
        return []
    sharing = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    return [one for name, value in bound(node) if name in sharing for one in nodes_in(value)]
