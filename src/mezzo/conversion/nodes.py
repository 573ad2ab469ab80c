"""Nodes of a graph: op properties, roles, the tensors a node reads, and aliasing."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mezzo._torch import HigherOrderOperator, OpOverload, pytree
from mezzo.policy.op_names import canonical
from mezzo.policy.presets.torch_amp import level_lists, torch_entries
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule

PROMOTING: frozenset[str] = frozenset(
    "add sub mul div pow maximum minimum fmax fmin fmod remainder floor_divide where eq ne lt le gt"
    " ge cat stack hstack vstack dstack logical_and logical_or logical_xor".split()
)
"""Ops whose kernels take inputs of different float dtypes and compute in the widest: if one input
is float32, a 16-bit one needs no cast.

Tested on a CPU. Ops that torch's CUDA list promotes explicitly (`atan2`, `addcmul`) are not here
because their kernels take one dtype."""

_MOVES = (
    "slice contiguous clone detach alias lift lift_fresh lift_fresh_copy unsafe_view unsafe_split"
    " unsafe_split_with_sizes unsafe_chunk copy constant_pad_nd pad expand_copy view_copy repeat"
    " repeat_interleave tile flip fliplr flipud roll rot90 tril triu cat stack hstack vstack dstack"
    " index_select gather take take_along_dim embedding masked_fill masked_select where"
    " pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d"
    " reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d"
    " upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d"
    " upsample_nearest_exact3d select_scatter slice_scatter diagonal_scatter diag diag_embed"
    " block_diag meshgrid im2col col2im numpy_T mT matrix_H mH to"
)
_MONOTONE = (
    "relu relu6 hardtanh clamp clamp_min clamp_max threshold neg abs sign maximum minimum fmax fmin"
    " max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
    " amax amin max min dropout feature_dropout alpha_dropout"
)

_VIEWS: frozenset[str] = frozenset(
    name
    for name, entry in level_lists(Level.O3, "cuda").entries.items()
    if entry.rule is Rule.KEEP and not name.endswith("_like") and name != "coalesce"
)
"""Ops that share their input's memory."""

VALUE_PRESERVING: frozenset[str] = frozenset((*_MOVES.split(), *_MONOTONE.split())) | _VIEWS
"""Ops that give the same numbers whether their inputs or their results are rounded: rounding the
inputs loses nothing if every reader rounds the result."""

GATHERS: frozenset[str] = frozenset({"embedding", "index_select"})
"""Ops that select rows of a table by index and return them unchanged."""

STRUCTURAL: frozenset[str] = frozenset(
    "slice contiguous clone detach alias lift lift_fresh lift_fresh_copy unsafe_view unsafe_split"
    " unsafe_split_with_sizes unsafe_chunk constant_pad_nd expand_copy view_copy im2col col2im"
    " numpy_T mT matrix_H mH".split()
)
"""Ops of exported graphs that no policy has a rule for: they only move values."""

SHAPE_ONLY: frozenset[str] = frozenset(
    "sym_size size sym_stride stride sym_numel numel sym_storage_offset storage_offset dim"
    " is_floating_point is_complex".split()
)
"""Ops that read a tensor's shape or dtype, never its values."""

SHAPE_ARGUMENTS: Mapping[str, frozenset[str]] = dict.fromkeys(
    ("expand_as", "view_as", "reshape_as"), frozenset({"other"})
)
"""Arguments of other ops of which only the shape is read."""

CASTS: frozenset[str] = frozenset("to to_copy type_as float double half bfloat16".split())
"""Casts that the model itself makes."""

FILLS: frozenset[str] = frozenset(
    "zeros ones full scalar_tensor new_zeros new_ones new_full".split()
)
"""Ops that create a tensor filled with one number, in any dtype in which the number fits."""

MIXED_PARAMETERS: Mapping[str, frozenset[str]] = {
    name: frozenset(arguments)
    for name, arguments in level_lists(Level.O3, "cuda").exempt_args.items()
}
"""Arguments that stay float32 although the input is 16-bit, which CPU and GPU kernels accept: the
parameters and statistics of batch norm."""

_STATISTICS: frozenset[str] = frozenset({"running_mean", "running_var"})
"""Arguments that a norm mutates in training mode although its schema does not declare it."""

RECURRENT_STATE: frozenset[str] = frozenset({"gru", "gru_cell", "lstm_cell"})
"""Layers whose kernels carry a state from step to step in the dtype of their weights. On a CPU
torch.autocast casts only the inner matrix products, and the state stays float32."""

_ALIASING: frozenset[str] = frozenset(
    {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
)
"""Ops that may return their input itself although their schema does not declare it."""


@cache
def float32_ops() -> Mapping[str, str]:
    """Return the ops that torch.autocast keeps in float32 on GPUs, each with the reason.

    Where a policy does not list them, they stay in float32 on every device.
    """
    listed = torch_entries("cuda").items()
    return {
        name: entry.reason
        for name, entry in listed
        if entry.rule is Rule.FULL and name not in VALUE_PRESERVING
    }


REWRITTEN = "mezzo_rewritten"
"""Key in a node's meta: a `Rewritten` record. The node keeps the dtypes that it has."""


@dataclass(frozen=True)
class Rewritten:
    """The op that a node replaces, and why."""

    op: str
    """The op that the model called; empty for a weight."""
    reason: str


class Role(Enum):
    """How a node takes part in the plan."""

    WEIGHT = "weight"
    """A parameter, buffer or constant that is never mutated: its stored dtype can be chosen."""
    INPUT = "input"
    """An input of the program, or a buffer that the graph mutates."""
    OP = "op"
    """An op whose precision is planned."""
    CAST = "cast"
    """A cast that the model itself makes."""
    FILL = "fill"
    """Creates a tensor filled with one number."""
    ELEMENT = "element"
    """Selects one result of an op that has several."""
    FIXED = "fixed"
    """Keeps the dtypes with which it was exported."""
    OUTPUT = "output"
    """The output node of the graph."""
    NO_FLOATS = "no_floats"
    """Reads and returns no floating-point values, or only the shape of a tensor."""


@dataclass(frozen=True)
class Read:
    """One floating-point tensor that a node reads."""

    argument: str
    """The argument's name; empty if the target has no schema."""
    node: Node


def _is_float(value: Any) -> bool:
    """Return whether a node's value is a floating-point or complex tensor."""
    return isinstance(value, torch.Tensor) and (
        value.dtype.is_floating_point or value.dtype.is_complex
    )


def float_values(node: Node) -> list[torch.Tensor]:
    """Return the floating-point tensors among a node's results, as fake tensors."""
    value = node.meta.get("val")
    results: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    return [result for result in results if _is_float(result)]


def named_arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Iterate over a call's arguments with their names, defaults included."""
    if not isinstance(node.target, OpOverload):
        yield from (("", value) for value in (*node.args, *node.kwargs.values()))
        return
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument.name, node.args[index]
        elif argument.name in node.kwargs:
            yield argument.name, node.kwargs[argument.name]
        elif argument.has_default_value():
            yield argument.name, argument.default_value


def nodes_in(value: Any) -> Iterator[Node]:
    """Iterate over the nodes in a nested argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_in(item)


def reads(node: Node) -> list[Read]:
    """Return the floating-point tensors whose values a node reads."""
    shape_only = SHAPE_ARGUMENTS.get(aten_name(node), ())
    return [
        Read(name, source)
        for name, value in named_arguments(node)
        if name not in shape_only
        for source in nodes_in(value)
        if float_values(source)
    ]


def aten_name(node: Node) -> str:
    """Return the canonical ATen name of the op that a node calls, without the registry."""
    return _aten_name(node.target) if isinstance(node.target, OpOverload) else ""


def op_name(node: Node) -> str | None:
    """Return the name that policies use for a node's op, or None if it is not registered."""
    if not isinstance(node.target, OpOverload):
        return None
    # The generation is part of the key: registering an op changes names.
    return _op_name(node.target, registry().generation)


@lru_cache(maxsize=4096)
def _aten_name(target: OpOverload[..., Any]) -> str:
    return canonical(target._schema.name.partition("::")[2])


@lru_cache(maxsize=4096)
def _op_name(target: OpOverload[..., Any], _generation: int) -> str | None:
    name = _aten_name(target)
    return name if target.namespace == "aten" and name in STRUCTURAL else registry().name_of(target)


def role_of(node: Node, half_dtype: torch.dtype) -> Role:
    """Return the role of a node, without regard to mutation.

    Placeholders and mutated nodes get their roles in `constraints.graph_facts`.
    """
    if node.op == "output":
        return Role.OUTPUT
    if node.op != "call_function" or not (float_values(node) or reads(node)):
        return Role.NO_FLOATS
    if node.target is operator.getitem:
        return Role.ELEMENT
    if isinstance(node.target, HigherOrderOperator) or not isinstance(node.target, OpOverload):
        return Role.FIXED
    return _role_of_op(node, half_dtype)


def _role_of_op(node: Node, half_dtype: torch.dtype) -> Role:
    name = aten_name(node) if node.target.namespace == "aten" else ""  # type: ignore[union-attr]
    if name in SHAPE_ONLY:
        return Role.NO_FLOATS
    if _has_other_dtypes(node, half_dtype):
        return Role.FIXED
    if name in CASTS:
        return Role.CAST
    if name in FILLS:
        return Role.FILL
    return Role.OP if op_name(node) is not None else Role.FIXED


def _has_other_dtypes(node: Node, half_dtype: torch.dtype) -> bool:
    """Return whether an op has dtypes besides float32 and the 16-bit one, or no float32 at all."""
    dtypes = {value.dtype for value in float_values(node)} | {
        value.dtype for read in reads(node) for value in float_values(read.node)
    }
    return not dtypes <= {torch.float32, half_dtype} or torch.float32 not in dtypes


def dtype_argument(node: Node) -> torch.dtype | None:
    """Return the `dtype=` of a call such as `softmax(x, dtype=torch.float32)`, or None."""
    dtype = dict(named_arguments(node)).get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else None


def deciding_reads(node: Node) -> list[Read]:
    """Return the reads that decide the precision of an op under type promotion.

    The parameters of batch norm do not, nor do scalar tensors if another input has dimensions.
    """
    exempt = MIXED_PARAMETERS.get(op_name(node) or "", frozenset())
    candidates = [read for read in reads(node) if read.argument not in exempt]
    with_dims = [
        read for read in candidates if any(value.dim() for value in float_values(read.node))
    ]
    return with_dims or candidates


OUTPUT_DTYPES = "mezzo_outputs"
"""Key in the meta of an output node: the dtypes of the model's outputs, None for other values."""


def output_values(node: Node) -> list[Any]:
    """Return the values of an output node, in order."""
    return pytree.tree_leaves(node.args, is_leaf=lambda value: isinstance(value, Node))


_NORMS = frozenset({"batch_norm", "instance_norm"})


def alias_sets(graph: Graph) -> dict[Node, list[Node]]:
    """Return for each node the nodes that may share its memory, itself included, in graph order."""
    leader: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while leader.setdefault(node, node) is not node:
            node = leader[node]
        return node

    for node in graph.nodes:
        root = find(node)
        for shared in _aliased_inputs(node):
            other = find(shared)
            if other is not root:
                leader[root] = other
                root = other
    sets: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        sets.setdefault(find(node), []).append(node)
    return {node: sets[find(node)] for node in graph.nodes}


def mutated_nodes(graph: Graph) -> frozenset[Node]:
    """Return every node whose memory an op of the graph mutates, also through an alias."""
    sets = alias_sets(graph)
    return frozenset(
        alias for node in graph.nodes for value in mutated_inputs(node) for alias in sets[value]
    )


def mutated_inputs(node: Node) -> list[Node]:
    """Return the tensors that a node mutates."""
    if not isinstance(node.target, OpOverload):
        return []
    mutated = {
        argument.name
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if aten_name(node) in _NORMS:
        arguments = dict(named_arguments(node))
        if arguments.get("training", arguments.get("use_input_stats")):
            mutated |= _STATISTICS
    return [
        source
        for name, value in named_arguments(node)
        if name in mutated
        for source in nodes_in(value)
    ]


def _aliased_inputs(node: Node) -> list[Node]:
    if node.target is operator.getitem:
        return list(nodes_in(node.args[0]))
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    if aten_name(node) in _ALIASING:
        return list(nodes_in(node.args[0]))
    if not any(returned.alias_info is not None for returned in schema.returns):
        return []
    aliased = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    return [
        source
        for name, value in named_arguments(node)
        if name in aliased
        for source in nodes_in(value)
    ]


def copied_graph(module: GraphModule) -> GraphModule:
    """Copy a graph and its subgraphs; every node keeps its name.

    `copy.deepcopy` alone renames nodes that are called like Python builtins, such as `input`.
    """
    copied = copy.deepcopy(module)
    for one, other in zip(module.modules(), copied.modules(), strict=True):
        if isinstance(one, GraphModule) and isinstance(other, GraphModule):
            for node, copied_node in zip(one.graph.nodes, other.graph.nodes, strict=True):
                copied_node.name = node.name
    return copied
