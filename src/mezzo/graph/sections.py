"""A graph and the bodies of its branches and loops, each planned by itself between dtypes that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from mezzo.graph.lists import Words
from mezzo.graph.nodes import Role, nodes_in
from mezzo.graph.planning import Planned, plan_graph

_PLANNED = frozenset("cond while_loop map map_impl scan associative_scan tag_activation_checkpoint wrap_activation_checkpoint".split())
"""Operators whose bodies are planned; others keep theirs as they are."""


@dataclass(frozen=True)
class Section:
    """One graph of a program, and its plan."""

    module: GraphModule
    prefix: str
    """What stands before the names of its nodes; empty for the program itself."""
    planned: Planned


def plan_sections(module: GraphModule, weights: Mapping[Node, str], said: Words, modules: Mapping[str, nn.Module], prefix: str = "") -> list[Section]:
    """Plan a graph, then the bodies in it; the graph itself comes first."""
    planned = plan_graph(module, prefix, weights, said, modules)
    inside: list[Section] = []
    lent: dict[tuple[Node, Node], torch.dtype] = {}
    for node in module.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _PLANNED:
            continue
        operands = _lendable(node, planned) if said.cast_params else {}
        faults = {place: weights.get(operand, "") for place, operand in operands.items()}
        sections = [_plan_body(body, faults, said, modules, prefix) for body in bodies(module, node)]
        wanted = {name: set().union(*(_demands(found[0], place) for found in sections)) for place, name in operands.items()}
        for place, operand in operands.items():
            if wanted[operand] == {said.dtype}:
                lent[node, operand] = said.dtype
        inside += [one for found in sections for one in _lend(found, node, operands, lent)]
    return [Section(module, prefix, replace(planned, choice=replace(planned.choice, lent=lent))), *inside]


def bodies(module: GraphModule, node: Node) -> Iterator[tuple[str, GraphModule]]:
    """The graphs that an operator calls, by name."""
    for one in nodes_in(node.args):
        if one.op == "get_attr" and isinstance(body := getattr(module, str(one.target), None), GraphModule):
            yield str(one.target), body


def _lendable(node: Node, planned: Planned) -> dict[int, Node]:
    """The weights that an operator hands to all its bodies unchanged, by their place among the bodies' inputs."""
    operands: Any = ()
    if node.target.name() == "cond":  # type: ignore[union-attr]
        operands, fixed = node.args[3], 0
    elif node.target.name() == "while_loop":  # type: ignore[union-attr]
        operands, fixed = (*node.args[2], *node.args[3]), len(node.args[2])  # type: ignore[misc,arg-type]
    else:
        return {}
    carried = set(nodes_in(operands[:fixed]))
    return {
        place: one
        for place, one in enumerate(operands)
        if isinstance(one, Node) and place >= fixed and one not in carried and planned.choice.roles[one] is Role.WEIGHT
    }


def _plan_body(body: tuple[str, GraphModule], faults: Mapping[int, str], said: Words, modules: Mapping[str, nn.Module], prefix: str) -> list[Section]:
    name, inner = body
    placeholders = inner.graph.find_nodes(op="placeholder")
    # What goes into a body and comes out keeps its dtype: the operator compares the branches.
    return plan_sections(inner, {placeholders[place]: fault for place, fault in faults.items()}, replace(said, keep_io=True), modules, f"{prefix}{name}.")


def _demands(section: Section, place: int) -> set[torch.dtype]:
    placeholder = section.module.graph.find_nodes(op="placeholder")[place]
    return section.planned.choice.demands(placeholder)


def _lend(sections: list[Section], node: Node, operands: Mapping[int, Node], lent: Mapping[tuple[Node, Node], torch.dtype]) -> list[Section]:
    """The sections of one body, its weights in the dtype that they come in."""
    first, *others = sections
    placeholders = first.module.graph.find_nodes(op="placeholder")
    halves = frozenset(placeholders[place] for place, operand in operands.items() if (node, operand) in lent)
    choice = replace(first.planned.choice, cast_params=False, squeezed=halves)
    return [replace(first, planned=replace(first.planned, choice=choice)), *others]
