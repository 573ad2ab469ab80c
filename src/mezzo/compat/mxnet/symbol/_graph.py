"""MXNet's graphs as values, and their JSON: read defensively, written as MXNet does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mezzo._errors import CheckpointError

VARIABLE = "null"
CASTS = ("amp_cast", "amp_multicast")
_VERSION = 10901
"""The version that written files carry: 1.9.1, the last of MXNet 1."""

_HIDDEN_KEYS = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")
"""Attributes for the optimizer and the scheduler, which old files have beside those of an op."""


_ENTRY_SIZES = (2, 3)


class Entry(NamedTuple):
    """An output of a node."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Node:
    """A variable or an op with its inputs."""

    op: str
    name: str
    inputs: tuple[Entry, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_variable(self) -> bool:
        """Whether the node is an input or a parameter."""
        return self.op == VARIABLE


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order and the entries that are the outputs."""

    nodes: tuple[Node, ...]
    heads: tuple[Entry, ...]
    document: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The JSON that the graph was read from, which is written again for an unchanged graph."""

    @cached_property
    def users(self) -> Mapping[int, list[tuple[int, int]]]:
        """The users of each node: their indices, and the positions of the input."""
        users: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(self.nodes))}
        for index, node in enumerate(self.nodes):
            for position, entry in enumerate(node.inputs):
                users[entry.node].append((index, position))
        return users

    def to_json(self) -> str:
        """Return the graph as JSON; a graph that was read and not changed has equal JSON."""
        if self.document is not None:
            return json.dumps(self.document, indent=2)
        nodes = [
            {"op": node.op, "name": node.name}
            | ({"attrs": dict(node.attributes)} if node.attributes else {})
            | {"inputs": [[*entry, 0] for entry in node.inputs]}
            for node in self.nodes
        ]
        document = {
            "nodes": nodes,
            "arg_nodes": [index for index, node in enumerate(self.nodes) if node.is_variable],
            "node_row_ptr": list(range(len(nodes) + 1)),
            "heads": [[*entry, 0] for entry in self.heads],
            "attrs": {"mxnet_version": ["int", _VERSION]},
        }
        return json.dumps(document, indent=2)


class GraphBuilder:
    """Copies a graph node by node, with changes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.moved: dict[Entry, Entry] = {}
        """Where the outputs of the original graph are in the new one."""

    def add(self, node: Node) -> int:
        """Append a node whose inputs are entries of the new graph; return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def place(self, entry: Entry) -> Entry:
        """Return where an output of the original graph is in the new one."""
        return self.moved.get(entry, entry)

    def copy(self, index: int, node: Node, inputs: Iterable[Entry], outputs: int = 1) -> int:
        """Append a node of the original graph with other inputs; return its new index."""
        added = self.add(replace(node, inputs=tuple(inputs)))
        for output in range(outputs):
            self.moved[Entry(index, output)] = Entry(added, output)
        return added


def with_heads(graph: Graph, heads: Iterable[Entry]) -> Graph:
    """Return the part of a graph that computes these entries."""
    heads = tuple(heads)
    needed = {entry.node for entry in heads}
    for index in range(len(graph.nodes) - 1, -1, -1):
        if index in needed:
            needed.update(entry.node for entry in graph.nodes[index].inputs)
    kept = sorted(needed)
    place = {old: new for new, old in enumerate(kept)}

    def move(entry: Entry) -> Entry:
        return Entry(place[entry.node], entry.output)

    return Graph(
        tuple(
            replace(graph.nodes[index], inputs=tuple(map(move, graph.nodes[index].inputs)))
            for index in kept
        ),
        tuple(map(move, heads)),
    )


def without_casts(graph: Graph) -> Graph:
    """Return the graph without the nodes that a conversion to mixed precision inserted."""
    if not any(node.op in CASTS for node in graph.nodes):
        return graph
    source: dict[Entry, Entry] = {}
    for index, node in enumerate(graph.nodes):
        if node.op in CASTS:
            source |= {
                Entry(index, output): source.get(entry, entry)
                for output, entry in enumerate(node.inputs)
            }
    nodes = tuple(
        replace(node, inputs=tuple(source.get(entry, entry) for entry in node.inputs))
        for node in graph.nodes
    )
    return with_heads(Graph(nodes, ()), (source.get(entry, entry) for entry in graph.heads))


def parse_graph(text: str, name: str = "the JSON") -> Graph:
    """Read a graph from JSON of any version; raise `CheckpointError` if it is none.

    >>> graph = parse_graph(
    ...     '{"nodes": [{"op": "null", "name": "x", "inputs": []}], "heads": [[0, 0]]}'
    ... )
    >>> graph.nodes
    (Node(op='null', name='x', inputs=(), attributes={}),)
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON, as MXNet writes symbols: {error}.") from None
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise CheckpointError(
            f"{name} is not a symbol of MXNet: expected an object with a list of nodes."
        )
    nodes = tuple(
        _parse_node(data, index, f"{name}: node {index}")
        for index, data in enumerate(document["nodes"])
    )
    heads = _parse_entries(document.get("heads"), len(nodes), f"{name}: heads")
    if not heads:
        raise CheckpointError(f"{name} has no heads: expected at least one output.")
    for index in document.get("arg_nodes") or ():
        if type(index) is not int or not 0 <= index < len(nodes) or not nodes[index].is_variable:
            raise CheckpointError(
                f"{name}: arg_nodes has {index!r}, expected the indices of variables."
            )
    return Graph(nodes, heads, document)


def _parse_node(data: Any, index: int, where: str) -> Node:
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} is {type(data).__name__}, expected an object.")
    for key in ("op", "name"):
        if not isinstance(data.get(key), str):
            raise CheckpointError(f"{where} has {key} {data.get(key)!r}, expected a string.")
    # Inputs come before their users, so that there are no cycles.
    inputs = _parse_entries(data.get("inputs"), index, f"{where} ({data['name']!r}) inputs")
    if data["op"] == VARIABLE and inputs:
        raise CheckpointError(f"{where} ({data['name']!r}) is a variable, which has no inputs.")
    attributes: dict[str, str] = {}
    # The newest name last. Files before MXNet 1.0 have attr, before 0.9 param for those of the op.
    for key in ("attr", "param", "attrs"):
        found = data.get(key) or {}
        if not isinstance(found, dict):
            raise CheckpointError(f"{where} has {key} {found!r}, expected an object.")
        attributes |= {name: str(value) for name, value in found.items() if not _is_hidden(name)}
    return Node(data["op"], data["name"], inputs, attributes)


def _parse_entries(data: Any, count: int, where: str) -> tuple[Entry, ...]:
    """Read entries, each of a node's index, an output and in newer files a version."""
    if not isinstance(data, list):
        raise CheckpointError(f"{where}: expected a list, got {type(data).__name__}.")
    for entry in data:
        if (
            not isinstance(entry, list)
            or len(entry) not in _ENTRY_SIZES
            or any(type(number) is not int or number < 0 for number in entry)
            or entry[0] >= count
        ):
            raise CheckpointError(
                f"{where}: got {entry!r}, expected [node, output, version] with a node before"
                f" {count}."
            )
    return tuple(Entry(entry[0], entry[1]) for entry in data)


def _is_hidden(name: str) -> bool:
    return any(name == key or name.endswith(f"_{key}") for key in _HIDDEN_KEYS)
