"""Insert MXNet's `amp_cast` and `amp_multicast` nodes into a graph by its op lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mezzo._dtypes import dtype_name
from mezzo.compat.mxnet._params import DTYPE_FLAGS
from mezzo.compat.mxnet.symbol._graph import CASTS, Entry, Graph, GraphBuilder, Node, with_heads
from mezzo.compat.mxnet.symbol._model import auxiliary_names, op_of
from mezzo.compat.mxnet.symbol._ops import Op

_DTYPE_ATTRIBUTE = "__dtype__"
_OWN_DTYPE = ("argmax", "argmin", "one_hot", "shape_array")
"""Ops whose outputs do not have the dtype of their inputs."""

Dtype = torch.dtype | None
"""None: known only when the graph runs, as for the data."""


@dataclass(frozen=True)
class CastLists:
    """MXNet's op lists of a conversion, by its names of ops."""

    dtype: torch.dtype
    target_ops: frozenset[str]
    """Ops that run in `dtype`."""
    fp32_ops: frozenset[str]
    widest_ops: frozenset[str]
    """Ops that run in the widest dtype of their inputs."""
    conditions: Sequence[tuple[str, str, Sequence[str]]] = ()
    """Ops that run in float32 for some values of an attribute."""
    excluded: frozenset[str] = frozenset()
    """Names of nodes that run in float32."""

    def runs_in_float32(self, node: Node, op: Op) -> bool:
        """Return whether a node runs in float32, whatever its inputs are."""
        return (
            node.name in self.excluded
            or op.name in self.fp32_ops
            or any(
                op.name == name and node.attributes.get(attribute) in values
                for name, attribute, values in self.conditions
            )
        )


def insert_casts(
    graph: Graph, lists: CastLists, params: Mapping[str, torch.dtype], *, cast_params: bool = False
) -> tuple[Graph, set[str]]:
    """Return the graph with casts, and the names of the parameters to store in 16 bits.

    Those are, with `cast_params`, the parameters that all their users take in 16 bits. Their casts
    are left out and the variables get MXNet's `__dtype__`.
    """
    caster = _Caster(graph, lists, params)
    for index, node in enumerate(graph.nodes):
        caster.convert(index, node)
    heads = [caster.as_dtype(entry, torch.float32) for entry in graph.heads]
    converted = Graph(tuple(caster.nodes), tuple(heads))
    stored = _storable(converted, lists.dtype, params.keys()) if cast_params else set()
    return _without_parameter_casts(converted, lists.dtype, stored), stored


class _Caster(GraphBuilder):
    """Copies a graph, with the inputs of its nodes cast."""

    def __init__(self, graph: Graph, lists: CastLists, params: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self._graph, self._lists, self._params = graph, lists, params
        self._auxiliary = auxiliary_names(graph)
        self._dtypes: dict[Entry, Dtype] = {}
        self._casts: dict[tuple[Entry, torch.dtype], Entry] = {}

    def convert(self, index: int, node: Node) -> None:
        """Append a node, after the casts of its inputs."""
        if node.is_variable:
            self.copy(index, node, ())
            self._dtypes[Entry(index)] = self._params.get(node.name)
            return
        op = op_of(node)
        attributes = op.parse(node)
        if node.op in CASTS or op.name == "Cast":
            inputs, dtype = list(map(self.place, node.inputs)), attributes.get("dtype")
        elif self._lists.runs_in_float32(node, op):
            inputs, dtype = self._inputs_as(node, op, torch.float32), torch.float32
        elif op.name in self._lists.target_ops:
            inputs, dtype = self._inputs_as(node, op, self._lists.dtype), self._lists.dtype
        elif op.name in self._lists.widest_ops:
            inputs, dtype = self._widest_inputs(node, op)
        else:
            dtype = self._dtypes[node.inputs[0]]
            inputs = self._parameters_as(node, op, dtype)
        count = op.count_outputs(attributes)
        self.copy(index, node, inputs, count)
        known = None if op.name in _OWN_DTYPE else dtype
        self._dtypes |= {Entry(index, output): known for output in range(count)}

    def as_dtype(self, entry: Entry, dtype: torch.dtype) -> Entry:
        """Return an output of the original graph in a dtype, with one cast for all users."""
        if self._dtypes[entry] is dtype:
            return self.place(entry)
        if (entry, dtype) not in self._casts:
            name = f"{self._output_name(entry)}_amp_cast_{dtype_name(dtype)}"
            attributes = {"dtype": dtype_name(dtype)}
            cast = Node("amp_cast", name, (self.place(entry),), attributes)
            self._casts[entry, dtype] = Entry(self.add(cast))
        return self._casts[entry, dtype]

    def _output_name(self, entry: Entry) -> str:
        node = self._graph.nodes[entry.node]
        if node.is_variable:
            return node.name
        several = Entry(entry.node, 1) in self._dtypes
        return f"{node.name}_output{entry.output if several else ''}"

    def _inputs_as(self, node: Node, op: Op, dtype: torch.dtype) -> list[Entry]:
        return [
            self.place(entry)
            if self._is_kept(entry, op, position)
            # Data that an op takes directly are float32 already, or integers.
            or (dtype is torch.float32 and self._is_data(entry))
            else self.as_dtype(entry, dtype)
            for position, entry in enumerate(node.inputs)
        ]

    def _is_data(self, entry: Entry) -> bool:
        return self._graph.nodes[entry.node].is_variable and self._dtypes[entry] is None

    def _is_kept(self, entry: Entry, op: Op, position: int) -> bool:
        return (
            op.inputs[position : position + 1] in [(name,) for name in op.float32_inputs]
            or self._graph.nodes[entry.node].name in self._auxiliary
        )

    def _widest_inputs(self, node: Node, op: Op) -> tuple[list[Entry], Dtype]:
        dtypes = {self._dtypes[entry] for entry in node.inputs}
        if dtypes <= {self._lists.dtype, torch.float32}:
            widest = torch.float32 if torch.float32 in dtypes else self._lists.dtype
            return self._inputs_as(node, op, widest), widest
        inputs = tuple(map(self.place, node.inputs))
        name = f"{self._output_name(node.inputs[0])}_amp_multicast"
        attributes = {"num_outputs": str(len(inputs))}
        multicast = self.add(Node("amp_multicast", name, inputs, attributes))
        return [Entry(multicast, output) for output in range(len(inputs))], None

    def _parameters_as(self, node: Node, op: Op, dtype: Dtype) -> list[Entry]:
        """Return the inputs of an op that runs in the dtype of its first input."""
        return [
            self.place(entry)
            if dtype is not self._lists.dtype
            or self._graph.nodes[entry.node].name not in self._params
            or self._is_kept(entry, op, position)
            else self.as_dtype(entry, dtype)
            for position, entry in enumerate(node.inputs)
        ]


def _storable(graph: Graph, dtype: torch.dtype, params: Iterable[str]) -> set[str]:
    names, heads = set(params), {entry.node for entry in graph.heads}

    def takes_16_bits(user: int) -> bool:
        node = graph.nodes[user]
        return node.op == "amp_cast" and node.attributes["dtype"] == dtype_name(dtype)

    return {
        node.name
        for index, node in enumerate(graph.nodes)
        if node.is_variable
        and node.name in names
        and index not in heads
        and graph.users[index]
        and all(takes_16_bits(user) for user, _ in graph.users[index])
    }


def _without_parameter_casts(graph: Graph, dtype: torch.dtype, stored: set[str]) -> Graph:
    source = {
        Entry(index): node.inputs[0]
        for index, node in enumerate(graph.nodes)
        if node.op == "amp_cast" and graph.nodes[node.inputs[0].node].name in stored
    }
    nodes = [
        replace(node, inputs=tuple(source.get(entry, entry) for entry in node.inputs))
        for node in graph.nodes
    ]
    flag = {_DTYPE_ATTRIBUTE: str(DTYPE_FLAGS[dtype])}
    nodes = [
        replace(node, attributes={**node.attributes, **flag})
        if node.is_variable and node.name in stored
        else node
        for node in nodes
    ]
    return with_heads(Graph(tuple(nodes), ()), graph.heads)
