"""`mxnet.symbol.Symbol`: a graph read from a file, its names, its JSON and its parts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mezzo._errors import CheckpointError, nearest
from mezzo._files import write_text
from mezzo.compat.mxnet.symbol._graph import (
    CASTS,
    Entry,
    Graph,
    parse_graph,
    with_heads,
    without_casts,
)
from mezzo.compat.mxnet.symbol._model import (
    SymbolModel,
    auxiliary_names,
    check_ops,
    label_names,
    op_of,
    with_auxiliary_inputs,
)

_log = logging.getLogger()


class Symbol:
    """`mxnet.symbol.Symbol`: a graph of ops, without parameters.

    `model(arg_params, aux_params)` is the torch module that runs it.
    """

    def __init__(self, graph: Graph, param_order: tuple[str, ...] = ()) -> None:
        self.graph = graph
        self.param_order = param_order
        """The order of the arrays in the checkpoint that the symbol was loaded with."""

    @property
    def name(self) -> str | None:
        """The name of the output's node; None for several outputs."""
        heads = self.graph.heads
        return self.graph.nodes[heads[0].node].name if len(heads) == 1 else None

    def list_inputs(self) -> list[str]:
        """Return the names of all variables."""
        names = (node.name for node in self.graph.nodes if node.is_variable)
        return list(dict.fromkeys(names))

    def list_arguments(self) -> list[str]:
        """Return the names of the inputs, labels and parameters."""
        auxiliary = auxiliary_names(self.graph)
        return [name for name in self.list_inputs() if name not in auxiliary]

    def list_auxiliary_states(self) -> list[str]:
        """Return the names of the moving averages."""
        auxiliary = auxiliary_names(self.graph)
        return [name for name in self.list_inputs() if name in auxiliary]

    def list_outputs(self) -> list[str]:
        """Return the names of the outputs, such as `softmax_output`."""
        return [output_name(self.graph, entry) for entry in self.graph.heads]

    def label_names(self) -> set[str]:
        """Return the labels of output layers, which inference does not need."""
        return label_names(self.graph)

    def attr_dict(self) -> dict[str, dict[str, str]]:
        """Return the attributes of all nodes that have some, by name."""
        return {node.name: dict(node.attributes) for node in self.graph.nodes if node.attributes}

    def get_internals(self) -> Symbol:
        """Return a symbol with the outputs of all nodes: `internals["flatten0_output"]` is one."""
        graph = self.graph
        heads = [
            Entry(index, output)
            for index, node in enumerate(graph.nodes)
            for output in range(_count_outputs(graph, index) if not node.is_variable else 1)
        ]
        return Symbol(Graph(graph.nodes, tuple(heads)))

    def __getitem__(self, index: int | str) -> Symbol:
        outputs = self.list_outputs()
        if isinstance(index, str):
            if index not in outputs:
                raise ValueError(
                    f"There is no output named {index!r}.{nearest(index, outputs)} See"
                    " list_outputs()."
                )
            index = outputs.index(index)
        if not -len(outputs) <= index < len(outputs):
            raise IndexError(f"Output {index} of a symbol that has {len(outputs)}.")
        return Symbol(with_heads(self.graph, [self.graph.heads[index]]))

    def __len__(self) -> int:
        return len(self.graph.heads)

    def __iter__(self) -> Iterator[Symbol]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<Symbol {self.name or 'group [' + ', '.join(self.list_outputs()) + ']'}>"

    def tojson(self, remove_amp_cast: bool = True) -> str:
        """Return the JSON; by default, as in MXNet, without the casts of a conversion."""
        return (without_casts(self.graph) if remove_amp_cast else self.graph).to_json()

    def save(self, fname: str | os.PathLike[str], remove_amp_cast: bool = True) -> None:
        """Write the JSON; by default, as in MXNet, without the casts of a conversion."""
        casts = sum(node.op in CASTS for node in self.graph.nodes)
        if remove_amp_cast and casts:
            _log.warning(
                "remove_amp_cast=True removes %d casts: %s runs in float32. Pass"
                " remove_amp_cast=False to keep them.",
                casts,
                os.fspath(fname),
            )
        write_text(fname, self.tojson(remove_amp_cast))

    def model(
        self,
        arg_params: Mapping[str, torch.Tensor],
        aux_params: Mapping[str, torch.Tensor] | None = None,
    ) -> SymbolModel:
        """Return a torch module that runs the graph with these parameters."""
        return SymbolModel(self.graph, {**arg_params, **(aux_params or {})})


def _count_outputs(graph: Graph, index: int) -> int:
    node = graph.nodes[index]
    return op_of(node).count_outputs(op_of(node).parse(node))


def output_name(graph: Graph, entry: Entry) -> str:
    """Return MXNet's name of an output: `fc1_output`, of several `split0_output1`."""
    node = graph.nodes[entry.node]
    if node.is_variable:
        return node.name
    several = _count_outputs(graph, entry.node) > 1
    return f"{node.name}_output{entry.output if several else ''}"


def load(fname: str | os.PathLike[str]) -> Symbol:
    """Load a symbol from a `-symbol.json` file.

    Raises `CheckpointError` if it is not valid, and `UnsupportedError` with all ops that are not
    supported.
    """
    try:
        text = Path(fname).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{os.fspath(fname)!r} is not a text file in UTF-8.") from None
    return load_json(text, repr(os.fspath(fname)))


def load_json(json_str: str, name: str = "The JSON") -> Symbol:
    """Load a symbol from JSON; errors start with `name`.

    >>> variable = '{"op": "null", "name": "x", "inputs": []}'
    >>> relu = '{"op": "relu", "name": "relu0", "inputs": [[0, 0, 0]]}'
    >>> symbol = load_json(f'{{"nodes": [{variable}, {relu}], "heads": [[1, 0, 0]]}}')
    >>> symbol.list_arguments(), symbol.list_outputs()
    (['x'], ['relu0_output'])
    >>> symbol.model({})(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """
    graph = with_auxiliary_inputs(parse_graph(json_str, name))
    check_ops(graph, name)
    return Symbol(graph)
