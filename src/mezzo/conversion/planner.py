"""The plan of a graph: what is settled, what the cut chooses, and what the weights are stored in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo.conversion.assignment import PrecisionAssignment, carrier, maker
from mezzo.conversion.constraints import (
    AS_AUTOCAST,
    GATHERED,
    RECURRENT,
    UNDECIDED,
    Constraint,
    GraphFacts,
    graph_facts,
    moved_bytes,
)
from mezzo.conversion.min_cut import Value, minimum_cut
from mezzo.conversion.nodes import (
    GATHERS,
    MIXED_PARAMETERS,
    PROMOTING,
    Read,
    Role,
    deciding,
    op_name,
    reads,
    stated_dtype,
    values,
)
from mezzo.conversion.options import ConvertOptions

_FULL, _HALF = "full", "half"
"""Readers that are not ops: what has to be float32 whatever the cut says, and what has to be
16-bit."""


BodyDtypes = Mapping[tuple[Node, Node], torch.dtype]
"""The dtype in which a branch or loop takes a value that is handed to its bodies, by the
operator and the value."""


@dataclass(frozen=True)
class PlannedGraph:
    """One graph, decided."""

    choice: PrecisionAssignment
    """The precision of each node."""
    pins: Mapping[Node, Constraint]
    """What was settled ahead, and why."""
    written: frozenset[Node]
    """Nodes whose memory the graph writes."""
    stored: frozenset[Node]
    """Placeholders of tensors that the program stores."""


def plan_graph(
    module: GraphModule,
    prefix: str,
    weights: Mapping[Node, str],
    said: ConvertOptions,
    modules: Mapping[str, nn.Module],
    lent: BodyDtypes,
) -> PlannedGraph:
    """Decide every node of one graph; bodies in it are planned by themselves."""
    known = graph_facts(module, prefix, weights, said, modules)
    pins, choice = known.pins, _cut(known, known.pins, said, lent)
    # Bodies of branches and loops store no weights: the graph around them does.
    if not prefix and (rounded := _rounded(choice, pins)):
        pins = {
            **pins,
            **{
                user: GATHERED
                for weight in rounded
                for user in weight.users
                if _is_open_gather(user, pins)
            },
        }
        choice = replace(_cut(known, pins, said, lent), rounded=rounded)
    return PlannedGraph(choice, pins, known.written, frozenset(weights))


def _rounded(choice: PrecisionAssignment, pins: Mapping[Node, Constraint]) -> frozenset[Node]:
    """Return the weights to store in 16 bits only, even if an op that torch.autocast runs in float32 reads them.

    These are tables whose rows are picked by index, and the matrices of layers that carry a state.
    Their other readers have to run in 16 bits anyway, as a head does that is tied to the table.
    What is only added stays float32: such weights are small, and no op would round them under
    torch.autocast.
    """
    if not choice.cast_params:
        return frozenset()

    def rounds(user: Node, weight: Node) -> bool:
        return _is_open_gather(user, pins) or (
            pins[user] == RECURRENT and values(weight)[0].dim() > 1
        )

    def takes_half(user: Node, weight: Node) -> bool:
        return all(
            choice.input_dtype(user, read) is choice.half
            for read in reads(user)
            if read.node is weight
        )

    found = []
    for weight in (node for node, role in choice.roles.items() if role is Role.WEIGHT):
        others = [user for user in weight.users if not rounds(user, weight)]
        if len(others) < len(weight.users) and all(takes_half(user, weight) for user in others):
            found.append(weight)
    return frozenset(found)


def _is_open_gather(user: Node, pins: Mapping[Node, Constraint]) -> bool:
    """Whether an op picks rows by index, and neither the call nor the policy says in which precision."""
    return op_name(user) in GATHERS and pins[user] in (UNDECIDED, AS_AUTOCAST)


def _cut(
    known: GraphFacts, pins: Mapping[Node, Constraint], said: ConvertOptions, lent: BodyDtypes
) -> PrecisionAssignment:
    settled = {node: _settled(node, known.roles[node], pins[node], said) for node in known.roles}
    pinned: dict[Hashable, bool] = {
        node: half for node, half in settled.items() if half is not None
    }
    pinned |= {_FULL: False, _HALF: True}
    found = list(_values(known.roles, settled, said, lent))
    chosen = minimum_cut(found, pinned)
    # An op that nobody who matters reads, or that reads only weights, is in no value: 16 bits, as
    # ties go.
    halves = {
        node: half if half is not None else chosen.get(node, True) for node, half in settled.items()
    }
    return PrecisionAssignment(
        known.roles,
        halves,
        said.dtype,
        said.keep_io_dtypes,
        said.cast_params and not said.nothing_to_cast,
        body_dtypes=lent,
    )


def _settled(node: Node, role: Role, pin: Constraint, said: ConvertOptions) -> bool | None:
    if role in (Role.OP, Role.FILL) or (role is Role.INPUT and not said.keep_io_dtypes):
        return pin.half
    made = values(node)
    return bool(made) and made[0].dtype is said.dtype


def _values(
    roles: Mapping[Node, Role],
    settled: Mapping[Node, bool | None],
    said: ConvertOptions,
    lent: BodyDtypes,
) -> Iterator[Value]:
    for node, role in roles.items():
        made = node.meta.get("val")
        if (
            not isinstance(made, torch.Tensor)
            or made.dtype not in (torch.float32, said.dtype)
            or (role is Role.WEIGHT and said.cast_params)
        ):
            continue
        strict: list[Hashable] = []
        promoting: list[Hashable] = []
        for user in node.users:
            for read in (one for one in reads(user) if one.node is node):
                reader, promotes = _reader(user, read, roles, settled, said, lent)
                if reader is not None:
                    (promoting if promotes else strict).append(reader)
        if strict or promoting:
            count = moved_bytes(made, torch.float32, said.dtype)
            up, down = (
                said.cast_cost_of(count, said.dtype, torch.float32),
                said.cast_cost_of(count, torch.float32, said.dtype),
            )
            yield Value(maker(node), tuple(strict), up, down, promoting=tuple(promoting))


def _reader(
    user: Node,
    read: Read,
    roles: Mapping[Node, Role],
    settled: Mapping[Node, bool | None],
    said: ConvertOptions,
    lent: BodyDtypes,
) -> tuple[Hashable | None, bool]:
    """Who reads a value in its own precision, and whether its kernel promotes 16 bits by itself."""
    match roles[user]:
        case Role.OP:
            return _op_reader(user, read, roles, settled)
        case Role.FIXED:
            wanted = lent.get((user, read.node), values(read.node)[0].dtype)
            return {torch.float32: _FULL, said.dtype: _HALF}.get(wanted), False
        case Role.CAST if values(user) and values(user)[0].dtype in (torch.float32, said.dtype):
            return (_HALF if values(user)[0].dtype is said.dtype else _FULL), False
        case Role.OUTPUT if said.keep_io_dtypes:
            asked = PrecisionAssignment(roles, {}, said.dtype, keep_io_dtypes=True).input_dtype(
                user, read
            )
            return (None if asked is None else _HALF if asked is said.dtype else _FULL), False
    return None, False


def _op_reader(
    user: Node, read: Read, roles: Mapping[Node, Role], settled: Mapping[Node, bool | None]
) -> tuple[Hashable | None, bool]:
    op = op_name(user) or ""
    if stated_dtype(user) is not None:
        return None, False
    if read.argument in MIXED_PARAMETERS.get(op, ()):
        return _FULL, False
    if op not in PROMOTING:
        return user, False
    if read not in deciding(user):
        return None, False
    return user, read != carrier(user, roles, settled)
