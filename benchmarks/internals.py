"""The only place where a benchmark imports private modules of mezzo, and why.

Each function measures a part that no public call runs alone: the checking kernel without the
optimizer, the planning of a graph without its export, the memory of a step without its tables.
The results of `mezzo compare`, their tables and its language model are here too, which only the
command shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mezzo
from mezzo.comparing.builtin_workloads import WORKLOADS, load_workload
from mezzo.comparing.charts import color_of
from mezzo.comparing.comparison import Comparison
from mezzo.comparing.modes import float32_products
from mezzo.comparing.networks import LanguageModel
from mezzo.comparing.stored import stored_results
from mezzo.comparing.table import documented_table, machine_name, machine_table, mode_table
from mezzo.comparing.verdict import verdict
from mezzo.comparing.workload import Documented, Preset
from mezzo.conversion.assignment import weight_nodes
from mezzo.conversion.export import export
from mezzo.conversion.nodes import copied_graph
from mezzo.conversion.normalize import normalize
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.subgraphs import plan_subgraphs
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.fused_step import FusedBinding
from mezzo.reporting.tables import Table
from mezzo.scaling.check_unscale import check_and_unscale

__all__ = [
    "Comparison",
    "Documented",
    "LanguageModel",
    "Table",
    "check_and_unscale",
    "color_of",
    "documented_numbers",
    "documented_table",
    "drop_step_tables",
    "float32_products",
    "machine_name",
    "machine_table",
    "mode_table",
    "planner",
    "stored_results",
    "verdict",
]


def planner(
    model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype
) -> tuple[int, Callable[[], float]]:
    """Export a model; return its number of nodes and a function that plans it and returns seconds.

    `mezzo.convert` exports before it plans, and torch.export takes longer than the plan.
    """
    options = ConvertOptions(mezzo.Policy("O1", dtype), dtype, "cpu")
    exported = export(model, args, {}, None)
    modules = dict(model.named_modules())

    def plan() -> float:
        graph = copied_graph(exported.graph_module)
        begin = time.perf_counter()
        normalize(graph, options.dtype, options.device)
        plan_subgraphs(graph, weight_nodes(exported, graph, options.dtype), options, modules)
        return time.perf_counter() - begin

    return len(exported.graph.nodes), plan


def drop_step_tables(optimizer: torch.optim.Optimizer) -> None:
    """Free the tables of addresses that a fused step keeps, to measure memory without them."""
    binding = optimizer_binding(optimizer)
    if isinstance(binding, FusedBinding):
        binding._plan = None


def documented_numbers() -> dict[str, tuple[Documented, ...]]:
    """Return what documents report about the built-in workloads."""
    workloads = [load_workload(name, Preset.SMALL) for name in WORKLOADS]
    return {one.name: one.documented for one in workloads if one.documented}
