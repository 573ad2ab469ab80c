"""Nodes of a graph: what an op computes, reads and aliases."""

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

from mezzo._torch import HigherOrderOperator, OpOverload
from mezzo.policy.op_names import canonical
from mezzo.policy.presets.torch_amp import level_lists, torch_entries
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule

PROMOTING: frozenset[str] = frozenset(
    "add sub mul div pow maximum minimum fmax fmin fmod remainder floor_divide where eq ne lt le gt"
    " ge cat stack hstack vstack dstack logical_and logical_or logical_xor".split()
)
"""Ops whose kernels take float dtypes that differ and compute in the widest: where one input is
float32, a 16-bit one beside it needs no cast.

Tried on a CPU; ops that torch's CUDA list promotes by hand (`atan2`, `addcmul`) are not here,
for their kernels take one dtype."""

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

VIEWS: frozenset[str] = frozenset(
    name
    for name, entry in level_lists(Level.O3, "cuda").entries.items()
    if entry.rule is Rule.KEEP and not name.endswith("_like") and name != "coalesce"
)
"""Ops that share their input's memory."""

VALUE_PRESERVING: frozenset[str] = frozenset((*_MOVES.split(), *_MONOTONE.split())) | VIEWS
"""Ops that give the same numbers whether their inputs or their results are rounded: rounding
early loses nothing if all who read the result round it."""

GATHERS: frozenset[str] = frozenset({"embedding", "index_select"})
"""Ops that pick rows of a table by index and give their numbers unchanged."""

STRUCTURAL: frozenset[str] = frozenset(
    "slice contiguous clone detach alias lift lift_fresh lift_fresh_copy unsafe_view unsafe_split"
    " unsafe_split_with_sizes unsafe_chunk constant_pad_nd expand_copy view_copy im2col col2im"
    " numpy_T mT matrix_H mH".split()
)
"""Ops that a graph holds and no policy has a rule for: they only move numbers."""

SHAPE_ONLY: frozenset[str] = frozenset(
    "sym_size size sym_stride stride sym_numel numel sym_storage_offset storage_offset dim"
    " is_floating_point is_complex".split()
)
"""Ops that read a tensor's shape, never its numbers."""

SHAPE_ARGUMENTS: Mapping[str, frozenset[str]] = dict.fromkeys(
    ("expand_as", "view_as", "reshape_as"), frozenset({"other"})
)
"""Arguments of other ops of which only the shape is read."""

CASTS: frozenset[str] = frozenset("to to_copy type_as float double half bfloat16".split())
"""The user's own conversions."""

FILLS: frozenset[str] = frozenset(
    "zeros ones full scalar_tensor new_zeros new_ones new_full".split()
)
"""Ops that make a tensor of one number: made in 16 bits as well as in float32, if the number
fits."""

MIXED_PARAMETERS: Mapping[str, frozenset[str]] = {
    name: frozenset(arguments)
    for name, arguments in level_lists(Level.O2, "cuda").exempt_args.items()
}
"""Arguments that stay float32 beside a 16-bit input, which the kernels of CPUs and GPUs take: a
batch norm's parameters and statistics."""

STATISTICS: frozenset[str] = frozenset({"running_mean", "running_var"})
"""Arguments that a norm in training writes, though its schema does not say so."""

RECURRENT_STATE: frozenset[str] = frozenset({"gru", "gru_cell", "lstm_cell"})
"""Layers whose kernels carry a state from step to step in the dtype of their weights. On a CPU
torch.autocast casts around the products inside, and the state stays float32."""

ALIASING: frozenset[str] = frozenset(
    {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
)
"""Ops that may give back their input itself, though their schema does not say so."""


@cache
def delicate_ops() -> Mapping[str, str]:
    """Return the ops that torch keeps in float32 on GPUs, with the reason. A policy that does not list them keeps them in float32 everywhere."""
    listed = torch_entries("cuda").items()
    return {
        name: entry.reason
        for name, entry in listed
        if entry.rule is Rule.FULL and name not in VALUE_PRESERVING
    }


REWRITTEN = "mezzo_rewritten"
"""In a node's meta: that it stands for another, as `Rewritten` tells, and keeps the dtypes that
it has."""


@dataclass(frozen=True)
class Rewritten:
    """What a node was put in place of."""

    op: str
    """The op that the model called; empty for a weight."""
    reason: str


class Role(Enum):
    """What a node is to the plan."""

    WEIGHT = "weight"
    """A parameter, buffer or constant that nothing writes: its stored dtype can be chosen."""
    INPUT = "input"
    """What the caller passes, and buffers that the graph writes."""
    OP = "op"
    """An op whose precision is planned."""
    CAST = "cast"
    """A conversion that the user wrote."""
    FILL = "fill"
    """Makes a tensor of one number."""
    ELEMENT = "element"
    """Takes one result of an op that has several."""
    FIXED = "fixed"
    """Keeps the dtypes that it was exported with."""
    OUTPUT = "output"
    """What the graph returns."""
    SILENT = "silent"
    """Has nothing to do with floating-point tensors, or only looks at their shape."""


@dataclass(frozen=True)
class Read:
    """One floating-point tensor that a node reads."""

    argument: str
    """The argument's name; empty where there is no schema."""
    node: Node


def is_float(value: Any) -> bool:
    """Whether a node's value is a floating-point or complex tensor."""
    return isinstance(value, torch.Tensor) and (
        value.dtype.is_floating_point or value.dtype.is_complex
    )


def values(node: Node) -> list[torch.Tensor]:
    """The floating-point tensors that a node makes."""
    made = node.meta.get("val")
    several: Iterable[Any] = made if isinstance(made, list | tuple) else [made]
    return [one for one in several if is_float(one)]


def bound(node: Node) -> Iterator[tuple[str, Any]]:
    """A call's arguments with their names, those left out included."""
    if not isinstance(node.target, OpOverload):
        yield from (("", value) for value in (*node.args, *node.kwargs.values()))
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            yield argument.name, node.args[place]
        elif argument.name in node.kwargs:
            yield argument.name, node.kwargs[argument.name]
        elif argument.has_default_value():
            yield argument.name, argument.default_value


def nodes_in(value: Any) -> Iterator[Node]:
    """Every node in a nested argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_in(item)


def reads(node: Node) -> list[Read]:
    """The floating-point tensors that a node reads."""
    looked_at = SHAPE_ARGUMENTS.get(aten_name(node), ())
    return [
        Read(name, one)
        for name, value in bound(node)
        if name not in looked_at
        for one in nodes_in(value)
        if values(one)
    ]


def aten_name(node: Node) -> str:
    """The name of the op that a node calls, before a policy's registry is asked for it."""
    return (
        canonical(node.target._schema.name.partition("::")[2])
        if isinstance(node.target, OpOverload)
        else ""
    )


def op_name(node: Node) -> str | None:
    """The name under which policies know a node's op."""
    return (
        _op_name(node.target, registry().generation)
        if isinstance(node.target, OpOverload)
        else None
    )


@lru_cache(maxsize=4096)
def _op_name(target: OpOverload[..., Any], _generation: int) -> str | None:
    bare = canonical(target._schema.name.partition("::")[2])
    return bare if target.namespace == "aten" and bare in STRUCTURAL else registry().name_of(target)


def role_of(node: Node, half: torch.dtype) -> Role:
    """What a node is; placeholders are told apart by who plans, and ops that write in place are fixed there too."""
    if node.op == "output":
        return Role.OUTPUT
    if node.op != "call_function" or not (values(node) or reads(node)):
        return Role.SILENT
    if node.target is operator.getitem:
        return Role.ELEMENT
    if isinstance(node.target, HigherOrderOperator) or not isinstance(node.target, OpOverload):
        return Role.FIXED
    return _role_of_op(node, half)


def _role_of_op(node: Node, half: torch.dtype) -> Role:
    name = aten_name(node) if node.target.namespace == "aten" else ""  # type: ignore[union-attr]
    if name in SHAPE_ONLY:
        return Role.SILENT
    if is_foreign(node, half):
        return Role.FIXED
    if name in CASTS:
        return Role.CAST
    if name in FILLS:
        return Role.FILL
    return Role.OP if op_name(node) is not None else Role.FIXED


def is_foreign(node: Node, half: torch.dtype) -> bool:
    """Whether an op computes in a dtype that is neither float32 nor the 16-bit one, or has no float32 in it at all."""
    dtypes = {one.dtype for one in values(node)} | {
        one.dtype for read in reads(node) for one in values(read.node)
    }
    return not dtypes <= {torch.float32, half} or torch.float32 not in dtypes


def stated_dtype(node: Node) -> torch.dtype | None:
    """The dtype that the user wrote in a call (`softmax(x, dtype=torch.float32)`), which stands."""
    told = dict(bound(node)).get("dtype")
    return told if isinstance(told, torch.dtype) else None


def deciding(node: Node) -> list[Read]:
    """The reads that take part in the precision of an op: not a batch norm's parameters, and no single numbers beside whole tensors."""
    exempt = MIXED_PARAMETERS.get(op_name(node) or "", frozenset())
    able = [read for read in reads(node) if read.argument not in exempt]
    whole = [read for read in able if any(one.dim() for one in values(read.node))]
    return whole or able


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
    writing = {
        argument.name
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if aten_name(node) in _NORMS:
        arguments = dict(bound(node))
        writing |= (
            STATISTICS
            if arguments.get("training", arguments.get("use_input_stats"))
            else frozenset()
        )
    return [one for name, value in bound(node) if name in writing for one in nodes_in(value)]


def _shares(node: Node) -> list[Node]:
    if node.target is operator.getitem:
        return list(nodes_in(node.args[0]))
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    if aten_name(node) in ALIASING:
        return list(nodes_in(node.args[0]))
    if not any(one.alias_info is not None for one in schema.returns):
        return []
    sharing = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    return [one for name, value in bound(node) if name in sharing for one in nodes_in(value)]


def copied_graph(module: GraphModule) -> GraphModule:
    """A copy of a graph and its bodies in which every node keeps its name: torch renames those that Python has a word for, such as `input`."""
    made = copy.deepcopy(module)
    for one, other in zip(module.modules(), made.modules(), strict=True):
        if isinstance(one, GraphModule) and isinstance(other, GraphModule):
            for node, twin in zip(one.graph.nodes, other.graph.nodes, strict=True):
                twin.name = node.name
    return made
