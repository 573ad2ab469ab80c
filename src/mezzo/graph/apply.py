"""A plan carried out on its graph: casts put in and shared, weights read in the dtype that they are stored in, example values brought up to date."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mezzo._torch import OpOverload
from mezzo.graph.nodes import Read, Role, values
from mezzo.graph.planning import Planned
from mezzo.graph.typing_run import dtypes_of, fake_mode, insert_cast, set_dtypes

_TO = 2
"""Arguments of a cast that does nothing else: what it reads, and the dtype."""

Variants = Mapping[tuple[Node, torch.dtype], Node]
"""Weights that are stored twice: the placeholder of each dtype."""


def apply_plan(module: GraphModule, planned: Planned, variants: Variants) -> None:
    """Change a graph as planned; `variants` holds the placeholders of weights in other dtypes than the one their own has."""
    made = {node: planned.choice.made(node) for node in planned.choice.roles if values(node)}
    reader = _Reader(module, planned, dict(variants), made)
    for node in list(planned.choice.roles):
        reader.rewrite(node)
    _refresh(module, planned, made)
    for node in sorted(reader.passed_over, reverse=True):
        if not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


class _Reader:
    """Gives every read the dtype that it wants."""

    def __init__(self, module: GraphModule, planned: Planned, known: dict[tuple[Node, torch.dtype], Node], made: Mapping[Node, torch.dtype]) -> None:
        self._module, self._planned, self._known, self._made = module, planned, known, made
        self.passed_over: dict[Node, None] = {}
        """The model's own casts whose results somebody would have cast back."""

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
        if (source := self._widened(read.node)) is not None and self._made[source] is wanted:
            self.passed_over[read.node] = None
            return source
        if read.node in self._planned.written:
            # Its numbers change between two reads: each casts anew.
            return insert_cast(self._module, read.node, wanted, node, node)
        if (read.node, wanted) not in self._known:
            self._known[read.node, wanted] = insert_cast(self._module, read.node, wanted, node, node)
        return self._known[read.node, wanted]

    def _widened(self, node: Node) -> Node | None:
        """What the model itself casts to a wider dtype here: cast back, it would be the same to the bit."""
        if node.target is not torch.ops.aten.to.dtype or len(node.args) != _TO or node.kwargs or not self._planned.written.isdisjoint({node, node.args[0]}):
            return None
        source: Any = node.args[0]
        return source if source in self._made and self._made[source].itemsize < self._made[node].itemsize else None


def _refresh(module: GraphModule, planned: Planned, made: Mapping[Node, torch.dtype]) -> None:
    mode = fake_mode(module)
    if mode is None:
        return
    for node, dtype in made.items():
        told = [dtype if one is torch.float32 else one for one in dtypes_of(node.meta["val"])]
        if planned.choice.roles[node] is not Role.FIXED:
            set_dtypes(node, told, mode)
