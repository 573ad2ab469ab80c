"""A plan carried out on its graph: casts put in and shared, weights read in the dtype that they are stored in, example values brought up to date."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from mezzo.graph.nodes import Read, Role, reads, values
from mezzo.graph.planning import Planned
from mezzo.graph.typing_run import dtypes_of, fake_mode, insert_cast, set_dtypes

Variants = Mapping[tuple[Node, torch.dtype], Node]
"""Weights that are stored twice: the placeholder of each dtype."""


def apply_plan(module: GraphModule, planned: Planned, variants: Variants) -> None:
    """Change a graph as planned; `variants` holds the placeholders of weights in other dtypes than the one their own has."""
    made = {node: planned.choice.made(node) for node in planned.choice.roles if values(node)}
    reader = _Reader(module, planned, dict(variants), made)
    for node in list(planned.choice.roles):
        reader.rewrite(node)
    for node in [one for one in reversed(reader.passed_over) if not one.users]:
        module.graph.erase_node(node)
    _refresh(module, planned, made)
    module.graph.lint()
    module.recompile()


class _Reader:
    """Gives every read the dtype that it wants."""

    def __init__(self, module: GraphModule, planned: Planned, known: dict[tuple[Node, torch.dtype], Node], made: Mapping[Node, torch.dtype]) -> None:
        self._module, self._planned, self._known, self._made = module, planned, known, made
        self.passed_over: list[Node] = []
        """The model's own casts behind which somebody reads what was before them."""

    def rewrite(self, node: Node) -> None:
        """Cast a node's inputs as the plan says."""
        if self._planned.choice.roles[node] in (Role.SILENT, Role.ELEMENT):
            return
        names = [argument.name for argument in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []
        node.args = tuple(self._argument(node, names[place] if place < len(names) else "", value) for place, value in enumerate(node.args))
        node.kwargs = {name: self._argument(node, name, value) for name, value in node.kwargs.items()}
        if self._planned.choice.roles[node] is Role.FILL:
            node.kwargs = {**node.kwargs, "dtype": self._made[node]}

    def _argument(self, node: Node, name: str, value: Any) -> Any:
        if isinstance(value, Node):
            return self._read(node, Read(name, value)) if values(value) else value
        if isinstance(value, list | tuple):
            return type(value)(self._argument(node, name, item) for item in value)
        if isinstance(value, dict):
            return {key: self._argument(node, name, item) for key, item in value.items()}
        return value

    def _read(self, node: Node, read: Read) -> Node:
        wanted = self._planned.choice.wants(node, read)
        if wanted is None or not isinstance(read.node.meta["val"], torch.Tensor) or wanted is self._made[read.node]:
            return read.node
        if read.node in self._planned.written:
            # Its numbers change between two reads: each casts anew.
            return insert_cast(self._module, read.node, wanted, node, node)
        if (narrow := self._unwidened(read.node, wanted)) is not None:
            return narrow
        if (read.node, wanted) not in self._known:
            self._known[read.node, wanted] = insert_cast(self._module, read.node, wanted, node, node)
        return self._known[read.node, wanted]

    def _unwidened(self, node: Node, wanted: torch.dtype) -> Node | None:
        """What the model itself casts to float32, where it is wanted as it was: 16 bits come back from float32 unchanged."""
        if self._planned.choice.roles[node] is not Role.CAST or self._made[node] is not torch.float32:
            return None
        source = next((read.node for read in reads(node)), None)
        if source is None or source in self._planned.written or self._made.get(source) is not wanted:
            return None
        if node not in self.passed_over:
            self.passed_over.append(node)
        return source


def _refresh(module: GraphModule, planned: Planned, made: Mapping[Node, torch.dtype]) -> None:
    mode = fake_mode(module)
    if mode is None:
        return
    for node, dtype in made.items():
        told = [dtype if one is torch.float32 else one for one in dtypes_of(node.meta["val"])]
        if planned.choice.roles[node] is not Role.FIXED:
            set_dtypes(node, told, mode)
