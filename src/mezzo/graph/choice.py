"""A complete choice of precisions, and what follows from it: the dtype of every value, and the dtype in which each read wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from mezzo._torch import HigherOrderOperator, OpOverload, pytree
from mezzo.graph.nodes import Read, Role, deciding, op_name, reads, said_dtype, values
from mezzo.graph.traits import LOOKED_AT, MIXED_PARAMETERS, PROMOTING

OUTPUTS = "mezzo_outputs"
"""In the meta of a graph's output: the dtypes that the model gave."""


@dataclass(frozen=True)
class Choice:
    """Which nodes run in 16 bits."""

    roles: Mapping[Node, Role]
    """What each node is."""
    halves: Mapping[Node, bool]
    """Whether each op, fill and input is in 16 bits."""
    half: torch.dtype
    """The 16-bit dtype."""
    keep_io: bool
    """Whether outputs keep the dtypes of the model."""
    cast_params: bool = True
    """Whether weights can be stored in the dtype that they are read in."""
    rounded: frozenset[Node] = field(default=frozenset())
    """Weights that are stored in 16 bits only, whatever their readers want."""
    lent: Mapping[tuple[Node, Node], torch.dtype] = field(default_factory=dict)
    """The dtype in which a branch or loop takes a weight that its body reads."""

    def made(self, node: Node) -> torch.dtype:
        """The dtype of a node's floating-point value; of a weight's, the one that it has if nobody else decides."""
        traced = values(node)[0].dtype
        if traced is not torch.float32:
            return traced
        found = self.roles[node]
        if found is Role.WEIGHT:
            return self.stored(node)[0]
        if found is Role.ELEMENT:
            return self.made(node.args[0]) if self.roles[maker(node)] is not Role.FIXED else traced  # type: ignore[arg-type]
        if found is Role.OP and said_dtype(node) is not None:
            return traced
        return self.half if self.halves.get(node) else traced

    def wants(self, node: Node, read: Read) -> torch.dtype | None:
        """The dtype in which a node reads a value; None takes it as it is."""
        match self.roles[node]:
            case Role.OP:
                return self._op_wants(node, read)
            case Role.FIXED:
                return self.lent.get((node, read.node), values(read.node)[0].dtype)
            case Role.CAST if self.cast_params and self.roles[read.node] is Role.WEIGHT and values(node):
                # A weight that the model casts itself is stored that way.
                return values(node)[0].dtype if values(node)[0].dtype in (torch.float32, self.half) else None
            case Role.OUTPUT if self.keep_io:
                return self._output_wants(node, read)
        return None

    def _op_wants(self, node: Node, read: Read) -> torch.dtype | None:
        op = op_name(node) or ""
        if said_dtype(node) is not None or read.argument in LOOKED_AT.get(op, ()):
            return None
        if read.argument in MIXED_PARAMETERS.get(op, ()):
            return values(read.node)[0].dtype
        wanted = self.half if self.halves.get(node) else torch.float32
        if op not in PROMOTING:
            return wanted
        if read not in deciding(node):
            return None
        if wanted is torch.float32 and read != self._carrier(node):
            return None
        return wanted

    def _carrier(self, node: Node) -> Read:
        """The input that makes a promoting kernel compute in float32: one that is float32 anyhow, else the planned one."""
        able = deciding(node)
        ready = [read for read in able if self._can_be_full(read.node)]
        return ready[0] if ready else carrier(node, self.roles, {})

    def _can_be_full(self, node: Node) -> bool:
        return node not in self.rounded if self.roles[node] is Role.WEIGHT else self.made(node) is torch.float32

    def _output_wants(self, node: Node, read: Read) -> torch.dtype | None:
        # One value may be returned twice, in the one dtype that it had.
        told = zip(output_values(node), node.meta.get(OUTPUTS, ()), strict=False)
        return next((dtype for value, dtype in told if value is read.node), values(read.node)[0].dtype)

    def demands(self, node: Node) -> set[torch.dtype]:
        """The dtypes in which a value is read."""
        wanted = (self.wants(user, read) for user in node.users for read in reads(user) if read.node is node)
        return {dtype for dtype in wanted if dtype is not None}

    def stored(self, weight: Node) -> tuple[torch.dtype, ...]:
        """The dtypes that a weight is stored in: one, or two where its readers disagree."""
        if weight in self.rounded:
            return (self.half,)
        if not self.cast_params:
            return (torch.float32,)
        wanted = self.demands(weight)
        # What nobody reads is not worth four bytes a number.
        return tuple(dtype for dtype in (torch.float32, self.half) if dtype in wanted) or ((torch.float32,) if weight.users else (self.half,))


def output_values(node: Node) -> list[Any]:
    """What a graph returns, in order."""
    return pytree.tree_leaves(node.args, is_leaf=lambda value: isinstance(value, Node))


def maker(node: Node) -> Node:
    """The op that made a value: for one result of several, the op before it."""
    while node.op == "call_function" and not isinstance(node.target, OpOverload) and node.args and isinstance(above := node.args[0], Node):
        if isinstance(node.target, HigherOrderOperator):
            break
        node = above
    return node


def carrier(node: Node, roles: Mapping[Node, Role], settled: Mapping[Node, bool | None]) -> Read:
    """The input through which a promoting op would come to float32: a weight, one that is settled float32, else the largest that is open."""

    def rank(read: Read) -> tuple[int, int]:
        free = 3 if roles[read.node] is Role.WEIGHT else {False: 2, None: 1, True: 0}[settled.get(maker(read.node))]
        return free, values(read.node)[0].dim()

    return max(deciding(node), key=rank)
