"""The plan of a graph: what is settled, what the cut chooses, and what the weights are stored in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo.graph.choice import Choice, carrier, maker
from mezzo.graph.cut import Value, cheapest
from mezzo.graph.follow import moved_bytes
from mezzo.graph.lists import Words
from mezzo.graph.nodes import Read, Role, deciding, op_name, reads, said_dtype, values
from mezzo.graph.pins import Pin
from mezzo.graph.squeeze import squeeze
from mezzo.graph.survey import Survey, survey
from mezzo.graph.traits import MIXED_PARAMETERS, PROMOTING

_FULL, _HALF = "full", "half"
"""Readers that are not ops: what has to be float32 whatever the cut says, and what has to be 16-bit."""


Lent = Mapping[tuple[Node, Node], torch.dtype]
"""The dtype in which a branch or loop takes a value that is handed to its bodies, by the operator and the value."""


@dataclass(frozen=True)
class Planned:
    """One graph, decided."""

    choice: Choice
    """The precision of each node."""
    pins: Mapping[Node, Pin]
    """What was settled ahead, and why."""
    written: frozenset[Node]
    """Nodes whose memory the graph writes."""
    stored: frozenset[Node]
    """Placeholders of tensors that the program stores."""


def plan_graph(module: GraphModule, prefix: str, weights: Mapping[Node, str], said: Words, modules: Mapping[str, nn.Module], lent: Lent) -> Planned:
    """Decide every node of one graph; bodies in it are planned by themselves."""
    known = survey(module, prefix, weights, said, modules)
    choice = _cut(known, known.pins, said, lent)
    # A body borrows its weights: the graph around it stores them.
    if said.cast_params and not prefix and not said.idle:
        squeezed, pins = squeeze(choice, known.pins)
        if squeezed:
            choice = replace(_cut(known, pins, said, lent), squeezed=squeezed)
            return Planned(choice, pins, known.written, frozenset(weights))
    return Planned(choice, known.pins, known.written, frozenset(weights))


def _cut(known: Survey, pins: Mapping[Node, Pin], said: Words, lent: Lent) -> Choice:
    settled = {node: _settled(node, known.roles[node], pins[node], said) for node in known.roles}
    pinned: dict[Hashable, bool] = {node: half for node, half in settled.items() if half is not None}
    pinned |= {_FULL: False, _HALF: True}
    found = list(_values(known.roles, settled, said, lent))
    chosen = cheapest(found, pinned)
    # An op that nobody who matters reads, or that reads only weights, is in no value: 16 bits, as ties go.
    halves = {node: half if half is not None else chosen.get(node, True) for node, half in settled.items()}
    return Choice(known.roles, halves, said.dtype, said.keep_io, said.cast_params and not said.idle, lent=lent)


def _settled(node: Node, role: Role, pin: Pin, said: Words) -> bool | None:
    if role in (Role.OP, Role.FILL) or (role is Role.INPUT and not said.keep_io):
        return pin.half
    made = values(node)
    return bool(made) and made[0].dtype is said.dtype


def _values(roles: Mapping[Node, Role], settled: Mapping[Node, bool | None], said: Words, lent: Lent) -> Iterator[Value]:
    for node, role in roles.items():
        made = node.meta.get("val")
        if not isinstance(made, torch.Tensor) or made.dtype not in (torch.float32, said.dtype) or (role is Role.WEIGHT and said.cast_params):
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
            up, down = said.price(count, said.dtype, torch.float32), said.price(count, torch.float32, said.dtype)
            yield Value(maker(node), tuple(strict), up, down, promoting=tuple(promoting))


def _reader(user: Node, read: Read, roles: Mapping[Node, Role], settled: Mapping[Node, bool | None], said: Words, lent: Lent) -> tuple[Hashable | None, bool]:
    """Who reads a value in its own precision, and whether its kernel promotes 16 bits by itself."""
    match roles[user]:
        case Role.OP:
            return _op_reader(user, read, roles, settled)
        case Role.FIXED:
            wanted = lent.get((user, read.node), values(read.node)[0].dtype)
            return {torch.float32: _FULL, said.dtype: _HALF}.get(wanted), False
        case Role.CAST if values(user) and values(user)[0].dtype in (torch.float32, said.dtype):
            return (_HALF if values(user)[0].dtype is said.dtype else _FULL), False
        case Role.OUTPUT if said.keep_io:
            asked = Choice(roles, {}, said.dtype, keep_io=True).wants(user, read)
            return (None if asked is None else _HALF if asked is said.dtype else _FULL), False
    return None, False


def _op_reader(user: Node, read: Read, roles: Mapping[Node, Role], settled: Mapping[Node, bool | None]) -> tuple[Hashable | None, bool]:
    op = op_name(user) or ""
    if said_dtype(user) is not None:
        return None, False
    if read.argument in MIXED_PARAMETERS.get(op, ()):
        return _FULL, False
    if op not in PROMOTING:
        return user, False
    if read not in deciding(user):
        return None, False
    return user, read != carrier(user, roles, settled)
