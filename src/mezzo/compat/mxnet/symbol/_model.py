"""Run MXNet's graphs with torch: a module whose parameters have MXNet's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mezzo._errors import CheckpointError, UnsupportedError
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor

# Each registers its ops.
from mezzo.compat.mxnet.symbol import (  # noqa: F401
    _elementwise_ops,
    _layer_ops,
    _pooling_ops,
    _shape_ops,
)
from mezzo.compat.mxnet.symbol._graph import VARIABLE, Entry, Graph, GraphBuilder, Node
from mezzo.compat.mxnet.symbol._ops import Op, find_op, supported_ops

Tensors = Mapping[str, torch.Tensor]

_MAX_OUTPUTS = 65536


def op_of(node: Node) -> Op:
    """Return the op of a node that `check_ops` has checked."""
    op = find_op(node.op)
    if op is None:
        raise UnsupportedError(f"The op {node.op} of node {node.name!r} is not supported.")
    return op


def check_ops(graph: Graph, name: str) -> None:
    """Raise one `UnsupportedError` with all ops that are missing, or `CheckpointError`.

    The latter is for inputs and attributes that an op cannot have.
    """
    missing: dict[str, list[str]] = {}
    for node in graph.nodes:
        if not node.is_variable and find_op(node.op) is None:
            missing.setdefault(node.op, []).append(node.name)
    if missing:
        found = "; ".join(f"{op} ({_listed(nodes)})" for op, nodes in missing.items())
        raise UnsupportedError(
            f"{name} has ops that are not supported here: {found}. Supported are:"
            f" {', '.join(supported_ops())}."
        )
    counts = [1 if node.is_variable else _count_outputs(node) for node in graph.nodes]
    for node in graph.nodes:
        if not node.is_variable:
            _check_inputs(node, op_of(node))
        for entry in node.inputs:
            _check_entry(graph, entry, counts, f"{name}: {node.op} {node.name!r}")
    for entry in graph.heads:
        _check_entry(graph, entry, counts, f"{name}: heads")


def _count_outputs(node: Node) -> int:
    count = op_of(node).count_outputs(op_of(node).parse(node))
    if not 1 <= count <= _MAX_OUTPUTS:
        raise CheckpointError(
            f"{node.op} {node.name!r} has {count} outputs, expected 1 to {_MAX_OUTPUTS}."
        )
    return count


def _listed(names: Sequence[str], shown: int = 3) -> str:
    quoted = ", ".join(repr(name) for name in names[:shown])
    return quoted if len(names) <= shown else f"{quoted} and {len(names) - shown} more"


def _check_inputs(node: Node, op: Op) -> None:
    found, least = len(node.inputs), 1 if op.variadic else len(op.inputs) - op.optional
    if found < least or (not op.variadic and found > len(op.inputs)):
        names = "any number" if op.variadic else ", ".join(op.inputs)
        raise CheckpointError(
            f"{node.op} {node.name!r} has {found} inputs, expected {least} or more of: {names}."
        )


def _check_entry(graph: Graph, entry: Entry, counts: Sequence[int], where: str) -> None:
    if entry.output >= counts[entry.node]:
        raise CheckpointError(
            f"{where} takes output {entry.output} of {graph.nodes[entry.node].name!r}, which has"
            f" {counts[entry.node]}."
        )


def with_auxiliary_inputs(graph: Graph) -> Graph:
    """Add the moving averages, which files before MXNet 0.9 do not list as inputs."""

    def missing(node: Node) -> list[str]:
        op = find_op(node.op)
        if op is None or not op.auxiliary or len(node.inputs) != op.auxiliary.start:
            return []
        return [f"{node.name}_{op.inputs[place]}" for place in op.auxiliary]

    if not any(missing(node) for node in graph.nodes):
        return graph
    builder = GraphBuilder()
    for index, node in enumerate(graph.nodes):
        added = [Entry(builder.add(Node(VARIABLE, name))) for name in missing(node)]
        inputs = [
            Entry(builder.moved[Entry(entry.node)].node, entry.output) for entry in node.inputs
        ]
        builder.copy(index, node, [*inputs, *added])
    heads = (Entry(builder.moved[Entry(entry.node)].node, entry.output) for entry in graph.heads)
    return Graph(tuple(builder.nodes), tuple(heads), graph.document)


@dataclass(frozen=True)
class _Step:
    """A node that is ready to run."""

    node: Node
    attributes: Mapping[str, Any]
    finished: tuple[int, ...]
    """Nodes whose outputs no later step needs."""


class SymbolModel(nn.Module):
    """A graph of MXNet and its parameters; it starts in evaluation mode.

    The variables without a parameter are the inputs, in the order of the graph; labels may be left
    out. `state_dict` has MXNet's names. Autocast has no effect inside: a graph has its own casts.
    """

    def __init__(self, graph: Graph, params: Tensors) -> None:
        super().__init__()
        self.graph = graph
        auxiliary = auxiliary_names(graph)
        variables = [node.name for node in graph.nodes if node.is_variable]
        self.input_names = [name for name in dict.fromkeys(variables) if name not in params]
        self.label_names = label_names(graph) & set(self.input_names)
        self.data_names = [name for name in self.input_names if name not in self.label_names]
        for name in dict.fromkeys(variables):
            if name in params:
                _register(self, name, as_tensor(params[name]).detach(), buffer=name in auxiliary)
        self._steps = _plan(graph)
        _check_shapes(self._steps, graph, params)
        self.eval()

    def forward(self, *data: Any, **named: Any) -> Any:
        """Run the graph on inputs by position or by name; return its output or a list of them."""
        inputs = {**self._by_name(data), **named}
        values = self.run({name: _to_tensor(value) for name, value in inputs.items()})
        arrays = any(isinstance(input_, NDArray) for input_ in inputs.values())
        outputs = [as_ndarray(value) for value in values] if arrays else values
        return outputs[0] if len(outputs) == 1 else outputs

    def _by_name(self, data: Sequence[Any]) -> dict[str, Any]:
        names = [*self.data_names, *sorted(self.label_names)]
        if len(data) > len(names):
            raise TypeError(
                f"The symbol takes {len(names)} inputs, {', '.join(names)}, got {len(data)}."
            )
        return dict(zip(names, data, strict=False))

    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        """Run the graph on inputs by name; return all outputs."""
        missing = [
            name for name in self.input_names if name not in inputs and name not in self.label_names
        ]
        if missing:
            raise ValueError(
                f"The symbol's inputs {', '.join(missing)} were not passed, and have no parameters."
            )
        values: dict[int, Any] = {}
        state = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
            **inputs,
        }
        with autocast_all_devices(enabled=False):
            for index, step in enumerate(self._steps):
                if step.node.is_variable:
                    values[index] = [state.get(step.node.name)]
                else:
                    values[index] = self._run_step(step, values)
                for finished in step.finished:
                    del values[finished]
        return [values[entry.node][entry.output] for entry in self.graph.heads]

    def _run_step(self, step: _Step, values: Mapping[int, Any]) -> Sequence[torch.Tensor]:
        inputs = [values[entry.node][entry.output] for entry in step.node.inputs]
        op = op_of(step.node)
        mode = {"training": self.training} if op.takes_mode else {}
        try:
            result = op.run(*inputs, **step.attributes, **mode)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(
                f"{self.graph.nodes[entry.node].name} {tuple(value.shape)}"
                for entry, value in zip(step.node.inputs, inputs, strict=True)
                if value is not None
            )
            raise RuntimeError(
                f"Error in operator {step.node.name} ({step.node.op}) on {shapes}:"
                f" {str(error).rstrip('.')}."
            ) from error
        return [result] if isinstance(result, torch.Tensor) else result


def _to_tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = as_tensor(value)
    return tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)


def _plan(graph: Graph) -> list[_Step]:
    heads = {entry.node for entry in graph.heads}
    last_use: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        last_use |= {entry.node: index for entry in node.inputs}
    finished: dict[int, list[int]] = {}
    for source, user in last_use.items():
        if source not in heads:
            finished.setdefault(user, []).append(source)
    return [
        _Step(
            node,
            {} if node.is_variable else op_of(node).parse(node),
            tuple(finished.get(index, ())),
        )
        for index, node in enumerate(graph.nodes)
    ]


def _check_shapes(steps: Sequence[_Step], graph: Graph, params: Tensors) -> None:
    """Raise `ValueError` for a parameter that has not the shape that the attributes give."""
    for step in steps:
        if step.node.is_variable:
            continue
        op = op_of(step.node)
        shapes = op.shapes(step.attributes)
        for name, entry in zip(op.inputs, step.node.inputs, strict=False):
            parameter = graph.nodes[entry.node].name
            if name not in shapes or parameter not in params:
                continue
            found, expected = tuple(params[parameter].shape), shapes[name]
            if len(found) != len(expected) or any(
                size not in (None, actual) for size, actual in zip(expected, found, strict=True)
            ):
                shown = ", ".join("any" if size is None else str(size) for size in expected)
                raise ValueError(
                    f"{parameter} has shape {found}, expected ({shown}) by the attributes of"
                    f" {step.node.op} {step.node.name!r}."
                )


def auxiliary_names(graph: Graph) -> set[str]:
    """Return the names of the moving averages."""
    return {
        graph.nodes[node.inputs[place].node].name
        for node in graph.nodes
        if not node.is_variable
        for place in op_of(node).auxiliary
        if place < len(node.inputs)
    }


def label_names(graph: Graph) -> set[str]:
    """Return the variables that are labels of output layers only, which inference ignores."""
    return {
        node.name
        for index, node in enumerate(graph.nodes)
        if node.is_variable
        and graph.users[index]
        and all(
            op_of(graph.nodes[user]).inputs[position : position + 1] == ("label",)
            for user, position in graph.users[index]
        )
    }


def _register(model: nn.Module, name: str, tensor: torch.Tensor, *, buffer: bool) -> None:
    """Add a parameter or buffer under its name; a dot in it makes a module inside."""
    *path, last = name.split(".")
    for part in path:
        inside = model._modules.get(part)
        if inside is None:
            inside = nn.Module()
            _check_free(model, part, name)
            model.add_module(part, inside)
        model = inside
    _check_free(model, last, name)
    if buffer:
        model.register_buffer(last, tensor)
    else:
        floating = tensor.is_floating_point()
        model.register_parameter(last, nn.Parameter(tensor, requires_grad=floating))


def _check_free(model: nn.Module, part: str, name: str) -> None:
    if not part or hasattr(model, part):
        raise UnsupportedError(
            f"A parameter cannot have the name {name!r}: torch.nn.Module has an attribute of this"
            " name. Rename it in the symbol and in the .params file."
        )
