"""A graph as the planner sees it: the role of each node, and what is settled ahead of the cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo._dtypes import dtype_name
from mezzo._torch import HigherOrderOperator
from mezzo.graph.aliases import written
from mezzo.graph.follow import follow
from mezzo.graph.lists import Words
from mezzo.graph.nodes import REWRITTEN, Role, base, deciding, op_name, role, said_dtype, values
from mezzo.graph.pins import FOLLOWS, FREE, Pin, pin
from mezzo.graph.tidy import REGION
from mezzo.graph.traits import CASTS, EXACT


@dataclass(frozen=True)
class Survey:
    """What is known of a graph before the cut."""

    roles: Mapping[Node, Role]
    """What each node is, in the graph's order."""
    pins: Mapping[Node, Pin]
    """The precision of each op, settled or open."""
    written: frozenset[Node]
    """Nodes whose memory the graph writes."""


def survey(module: GraphModule, prefix: str, weights: Mapping[Node, str], said: Words, modules: Mapping[str, nn.Module]) -> Survey:
    """Read a graph: roles, then what lists and words settle, then what follows from that.

    `weights` holds the placeholders whose stored dtype can be chosen, each with what forbids 16 bits, or nothing.
    """
    touched = written(module.graph)
    roles = {node: _role(node, weights, touched, said.dtype) for node in module.graph.nodes}
    listed = {node: pin(node, prefix + node.name, one, said, modules) for node, one in roles.items()}
    listed = {node: _fixed(node, roles[node], touched) or _overflow(node, roles, found, weights) or found for node, found in listed.items()}
    as_autocast = follow(roles, lambda node: listed[node].half, said.dtype)
    return Survey(roles, _followed(roles, listed, as_autocast, said), touched)


def _role(node: Node, weights: Collection[Node], touched: Collection[Node], half: torch.dtype) -> Role:
    if node.op == "placeholder":
        if not values(node):
            return Role.SILENT
        return Role.WEIGHT if node in weights and node not in touched and values(node)[0].dtype is torch.float32 else Role.INPUT
    found = role(node, half)
    if found in (Role.OP, Role.CAST, Role.FILL) and node in touched:
        return Role.FIXED
    return Role.FIXED if found in (Role.OP, Role.FILL) and (node.meta.get(REGION) == "kept" or REWRITTEN in node.meta) else found


def _fixed(node: Node, found: Role, touched: Collection[Node]) -> Pin | None:
    """Why a node keeps the dtypes that it was exported with."""
    if found is not Role.FIXED:
        return None
    if node in touched:
        return Pin(False, "its memory is written in place, so it keeps its dtype")
    if node.meta.get(REGION) == "kept":
        return Pin(False, "in a mezzo region of the model, which has settled its dtype")
    if REWRITTEN in node.meta:
        return Pin(False, node.meta[REWRITTEN].reason)
    if base(node) in CASTS:
        return Pin(False, "the model's own cast")
    if isinstance(node.target, HigherOrderOperator):
        return Pin(False, "calls bodies that have rows of their own, or that are left alone")
    if op_name(node) is None:
        return Pin(False, "not an op that mezzo knows: it keeps its dtypes")
    return Pin(False, f"already {dtype_name(values(node)[0].dtype)}: left alone" if values(node) else "left alone")


def _overflow(node: Node, roles: Mapping[Node, Role], found: Pin, weights: Mapping[Node, str]) -> Pin | None:
    """Why an op's weights keep it in float32: `weights` says for each what is wrong with its numbers, or nothing."""
    if roles[node] is not Role.OP or found.half is False:
        return None
    faults = [weights[read.node] for read in deciding(node) if weights.get(read.node)]
    return Pin(False, faults[0]) if faults else None


def _followed(roles: Mapping[Node, Role], listed: Mapping[Node, Pin], as_autocast: Mapping[Node, bool], said: Words) -> dict[Node, Pin]:
    """Settle what torch.autocast would run in float32, so that nothing is less precise than there.

    Only an op that gives the same numbers when its result is rounded later stays open, if everybody who reads the result rounds it.
    """
    settled = dict(listed)
    rounded: dict[Node, bool] = {}
    for node, found in reversed(list(roles.items())):
        rounded[node] = bool(node.users) and all(_rounds(user, node, roles, settled, rounded, said.dtype) for user in node.users)
        open_ended = found in (Role.OP, Role.FILL) or (found is Role.INPUT and not said.keep_io and node.op == "placeholder")
        if not open_ended or listed[node].half is not None or (as_autocast[node] and found is Role.OP):
            continue
        exact = found is not Role.OP or op_name(node) in EXACT
        if not (exact and rounded[node]):
            settled[node] = FOLLOWS
    return settled


def _rounds(user: Node, node: Node, roles: Mapping[Node, Role], settled: Mapping[Node, Pin], rounded: Mapping[Node, bool], half: torch.dtype) -> bool:
    match roles[user]:
        case Role.SILENT:
            return True
        case Role.ELEMENT:
            return rounded[user]
        case Role.CAST:
            return bool(values(user)) and values(user)[0].dtype is half
        case Role.OP:
            if said_dtype(user) is not None or all(read.node is not node for read in deciding(user)):
                return False
            return settled[user].half is True or (settled[user] is FREE and rounded[user])
    return False
