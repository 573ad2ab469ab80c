"""Small graphs for the tests of the converter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from mezzo.conversion.assignment import weight_nodes
from mezzo.conversion.converted import Converted
from mezzo.conversion.export import export
from mezzo.conversion.normalize import normalize
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.plan import GraphRow
from mezzo.conversion.planner import PlannedGraph
from mezzo.conversion.subgraphs import plan_subgraphs
from mezzo.policy.policy import Policy

HALF = torch.bfloat16


class Calls(nn.Module):
    """A module that calls a function, with the modules that the function uses."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def words(policy: Policy | None = None, **said: Any) -> ConvertOptions:
    return ConvertOptions(
        policy or Policy("O1", "bfloat16"), said.pop("dtype", HALF), "cpu", **said
    )


def graph(
    model: nn.Module | Callable[..., Any], *args: Any, tidied: bool = True, half: torch.dtype = HALF
) -> GraphModule:
    """Return the exported graph of a model, or of a function of tensors."""
    module = model if isinstance(model, nn.Module) else Calls(lambda _, *args: model(*args))
    exported: GraphModule = export(module, args, {}, None).graph_module
    if tidied:
        normalize(exported, half, "cpu")
    return exported


def planned(
    model: nn.Module, *args: Any, said: ConvertOptions | None = None
) -> tuple[GraphModule, PlannedGraph]:
    """Return a model's normalized graph and its plan."""
    said = said or words()
    exported = export(model, args, {}, None)
    normalize(exported.graph_module, said.dtype, "cpu")
    subgraphs = plan_subgraphs(
        exported.graph_module,
        weight_nodes(exported, exported.graph_module, said.dtype),
        said,
        dict(model.named_modules()),
    )
    return exported.graph_module, subgraphs[0].planned


def node(module: GraphModule, name: str) -> Node:
    return next(one for one in module.graph.nodes if one.name == name)


def names(module: GraphModule) -> list[str]:
    return [str(one.target) for one in module.graph.nodes if one.op == "call_function"]


def tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def relative_error(found: Any, expected: Any) -> float:
    """Return the largest relative error among the outputs."""
    pairs = [
        (one.detach().double(), other.detach().double())
        for one, other in zip(tensors(found), tensors(expected), strict=True)
    ]
    return max(float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in pairs)


def rounded_tables(converted: Converted) -> list[GraphRow]:
    """Return the rows of weights stored in 16 bits that torch.autocast reads in float32."""
    return [row for row in converted.plan if row.reason.startswith("stored in 16 bits")]


def with_rounded_tables(model: nn.Module, converted: Converted, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with its tables rounded as a converted program stores them."""
    copied = copy.deepcopy(model)
    state = copied.state_dict()
    for row in rounded_tables(converted):
        state[row.module].copy_(state[row.module].to(dtype))
    return copied
