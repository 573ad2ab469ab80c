"""One converted graph, with its plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch.export import ExportedProgram

from mezzo.graph.plan import GraphPlan


@dataclass(frozen=True)
class Program:
    """One converted graph, with its plan."""

    exported: ExportedProgram
    """The graph and its weights."""
    plan: GraphPlan
    """What was decided, and why."""
