"""Plan one graph: constraints, minimum cut, and the dtypes of stored weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo.conversion.assignment import PrecisionAssignment, producer, promoting_input
from mezzo.conversion.constraints import (
    AS_AUTOCAST,
    GATHERED,
    RECURRENT,
    UNDECIDED,
    Constraint,
    GraphFacts,
    cast_bytes,
    graph_facts,
)
from mezzo.conversion.min_cut import Value, minimum_cut
from mezzo.conversion.nodes import (
    GATHERS,
    MIXED_PARAMETERS,
    PROMOTING,
    Read,
    Role,
    deciding_reads,
    dtype_argument,
    float_values,
    op_name,
    reads,
)
from mezzo.conversion.options import ConvertOptions

_FULL, _HALF = "full", "half"
"""Readers that are not ops: one that needs float32 and one that needs 16 bits, always."""


BodyDtypes = Mapping[tuple[Node, Node], torch.dtype]
"""The dtype in which a branch or loop takes a value, by its node and the value."""


@dataclass(frozen=True)
class PlannedGraph:
    """The plan of one graph."""

    assignment: PrecisionAssignment
    """The precision of each node."""
    constraints: Mapping[Node, Constraint]
    """The precisions that were fixed before the cut, and why."""
    mutated: frozenset[Node]
    """Nodes whose memory the graph mutates."""
    stored: frozenset[Node]
    """Placeholders of tensors that the program stores."""


def plan_graph(
    module: GraphModule,
    prefix: str,
    weights: Mapping[Node, str],
    options: ConvertOptions,
    modules: Mapping[str, nn.Module],
    body_dtypes: BodyDtypes,
) -> PlannedGraph:
    """Choose the precision of every node of one graph, without the bodies of its branches."""
    facts = graph_facts(module, prefix, weights, options, modules)
    constraints = facts.constraints
    assignment = _assign(facts, constraints, options, body_dtypes)
    # Bodies of branches and loops store no weights: the graph around them does.
    if not prefix and (half_only := _half_only_weights(assignment, constraints)):
        gathers = {
            user: GATHERED
            for weight in half_only
            for user in weight.users
            if _is_unlisted_gather(user, constraints)
        }
        constraints = {**constraints, **gathers}
        assignment = _assign(facts, constraints, options, body_dtypes)
        assignment = replace(assignment, half_only=half_only)
    return PlannedGraph(assignment, constraints, facts.mutated, frozenset(weights))


def _half_only_weights(
    assignment: PrecisionAssignment, constraints: Mapping[Node, Constraint]
) -> frozenset[Node]:
    """Return the weights to store in 16 bits only, although torch.autocast reads them in float32.

    These are tables whose rows are selected by index, and the matrices of layers that carry a
    state. Their other readers have to run in 16 bits anyway, as a head does that is tied to the
    table. Weights that are only added stay float32: they are small, and torch.autocast would not
    round them.
    """
    if not assignment.cast_params:
        return frozenset()

    def tolerates_rounding(user: Node, weight: Node) -> bool:
        return _is_unlisted_gather(user, constraints) or (
            constraints[user] == RECURRENT and float_values(weight)[0].dim() > 1
        )

    def reads_half(user: Node, weight: Node) -> bool:
        return all(
            assignment.input_dtype(user, read) is assignment.half_dtype
            for read in reads(user)
            if read.node is weight
        )

    found = []
    for weight in (node for node, role in assignment.roles.items() if role is Role.WEIGHT):
        others = [user for user in weight.users if not tolerates_rounding(user, weight)]
        if len(others) < len(weight.users) and all(reads_half(user, weight) for user in others):
            found.append(weight)
    return frozenset(found)


def _is_unlisted_gather(user: Node, constraints: Mapping[Node, Constraint]) -> bool:
    """Return whether an op selects rows by index, and no list decides its precision."""
    return op_name(user) in GATHERS and constraints[user] in (UNDECIDED, AS_AUTOCAST)


def _assign(
    facts: GraphFacts,
    constraints: Mapping[Node, Constraint],
    options: ConvertOptions,
    body_dtypes: BodyDtypes,
) -> PrecisionAssignment:
    """Solve the minimum cut for the nodes that no constraint decides."""
    fixed = {
        node: _fixed_precision(node, role, constraints[node], options)
        for node, role in facts.roles.items()
    }
    fixed_ops: dict[Hashable, bool] = {
        node: half for node, half in fixed.items() if half is not None
    }
    values = list(_cut_values(facts.roles, fixed, options, body_dtypes))
    chosen = minimum_cut(values, fixed_ops | {_FULL: False, _HALF: True})
    # Ops whose precision changes no cast are in no value. Like ties, they run in 16 bits.
    in_half = {
        node: half if half is not None else chosen.get(node, True) for node, half in fixed.items()
    }
    return PrecisionAssignment(
        facts.roles,
        in_half,
        options.dtype,
        options.keep_io_dtypes,
        options.cast_params and not options.nothing_to_cast,
        body_dtypes=body_dtypes,
    )


def _fixed_precision(
    node: Node, role: Role, constraint: Constraint, options: ConvertOptions
) -> bool | None:
    if role in (Role.OP, Role.FILL) or (role is Role.INPUT and not options.keep_io_dtypes):
        return constraint.half
    results = float_values(node)
    return bool(results) and results[0].dtype is options.dtype


def _cut_values(
    roles: Mapping[Node, Role],
    fixed: Mapping[Node, bool | None],
    options: ConvertOptions,
    body_dtypes: BodyDtypes,
) -> Iterator[Value]:
    """Iterate over the tensors that the cut counts, with the costs of casting them."""
    for node, role in roles.items():
        traced = node.meta.get("val")
        if (
            not isinstance(traced, torch.Tensor)
            or traced.dtype not in (torch.float32, options.dtype)
            or (role is Role.WEIGHT and options.cast_params)
        ):
            continue
        strict: list[Hashable] = []
        promoting: list[Hashable] = []
        for user in node.users:
            for read in (read for read in reads(user) if read.node is node):
                reader = _reader(user, read, roles, fixed, options, body_dtypes)
                if reader is not None:
                    (promoting if reader.promotes else strict).append(reader.key)
        if strict or promoting:
            count = cast_bytes(traced, torch.float32, options.dtype)
            up = options.cast_cost_of(count, options.dtype, torch.float32)
            down = options.cast_cost_of(count, torch.float32, options.dtype)
            yield Value(producer(node), tuple(strict), up, down, promoting=tuple(promoting))


class _Reader(NamedTuple):
    """A reader of a value, as the cut counts it."""

    key: Hashable
    """The op, or `_FULL` or `_HALF`."""
    promotes: bool = False
    """Whether its kernel promotes a 16-bit value by itself."""


def _reader(
    user: Node,
    read: Read,
    roles: Mapping[Node, Role],
    fixed: Mapping[Node, bool | None],
    options: ConvertOptions,
    body_dtypes: BodyDtypes,
) -> _Reader | None:
    """Return the reader of a value; None if it takes the value in any precision."""
    dtype: torch.dtype | None = None
    match roles[user]:
        case Role.OP:
            return _op_reader(user, read, roles, fixed)
        case Role.FIXED:
            dtype = body_dtypes.get((user, read.node), float_values(read.node)[0].dtype)
        case Role.CAST if float_values(user):
            dtype = float_values(user)[0].dtype
        case Role.OUTPUT if options.keep_io_dtypes:
            io = PrecisionAssignment(roles, {}, options.dtype, keep_io_dtypes=True)
            dtype = io.input_dtype(user, read)
            return None if dtype is None else _Reader(_HALF if dtype is options.dtype else _FULL)
    if dtype is torch.float32:
        return _Reader(_FULL)
    return _Reader(_HALF) if dtype is options.dtype else None


def _op_reader(
    user: Node, read: Read, roles: Mapping[Node, Role], fixed: Mapping[Node, bool | None]
) -> _Reader | None:
    op = op_name(user) or ""
    if dtype_argument(user) is not None:
        return None
    if read.argument in MIXED_PARAMETERS.get(op, ()):
        return _Reader(_FULL)
    if op not in PROMOTING:
        return _Reader(user)
    if read not in deciding_reads(user):
        return None
    return _Reader(user, promotes=read != promoting_input(user, roles, fixed))
