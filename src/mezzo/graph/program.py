"""One converted graph, with its plan."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import GraphModule

from mezzo.graph.plan import GraphPlan


@dataclass(frozen=True)
class Program:
    """One converted graph, with its plan."""

    exported: ExportedProgram
    """The graph and its weights."""
    plan: GraphPlan
    """What was decided, and why."""


def copied(module: GraphModule) -> GraphModule:
    """A copy of a graph and its bodies in which every node keeps its name: torch renames those that Python has a word for, such as `input`."""
    made = copy.deepcopy(module)
    for one, other in zip(module.modules(), made.modules(), strict=True):
        if isinstance(one, GraphModule) and isinstance(other, GraphModule):
            for node, twin in zip(one.graph.nodes, other.graph.nodes, strict=True):
                twin.name = node.name
    return made
