"""A graph's nodes, read once: what each one is, which floating-point tensors it reads and under which argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from mezzo._torch import HigherOrderOperator, OpOverload
from mezzo.graph.traits import CASTS, FILLS, LOOKED_AT, LOOKS, MIXED_PARAMETERS, STRUCTURAL
from mezzo.policy.op_names import canonical
from mezzo.policy.registry import registry

REWRITTEN = "mezzo_rewritten"
"""In a node's meta: that it stands for another, as `Rewritten` tells, and keeps the dtypes that it has."""


@dataclass(frozen=True)
class Rewritten:
    """What a node was put in place of."""

    op: str
    """The op that the model called; empty for a weight."""
    reason: str


class Role(Enum):
    """What a node is to the plan."""

    WEIGHT = "weight"
    """A parameter, buffer or constant that nothing writes: its stored dtype can be chosen."""
    INPUT = "input"
    """What the caller passes, and buffers that the graph writes."""
    OP = "op"
    """An op whose precision is planned."""
    CAST = "cast"
    """A conversion that the user wrote."""
    FILL = "fill"
    """Makes a tensor of one number."""
    ELEMENT = "element"
    """Takes one result of an op that has several."""
    FIXED = "fixed"
    """Keeps the dtypes that it was exported with."""
    OUTPUT = "output"
    """What the graph returns."""
    SILENT = "silent"
    """Has nothing to do with floating-point tensors, or only looks at their shape."""


@dataclass(frozen=True)
class Read:
    """One floating-point tensor that a node reads."""

    argument: str
    """The argument's name; empty where there is no schema."""
    node: Node


def is_float(value: Any) -> bool:
    """Whether a node's value is a floating-point or complex tensor."""
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def values(node: Node) -> list[torch.Tensor]:
    """The floating-point tensors that a node makes."""
    made = node.meta.get("val")
    several: Iterable[Any] = made if isinstance(made, list | tuple) else [made]
    return [one for one in several if is_float(one)]


def bound(node: Node) -> Iterator[tuple[str, Any]]:
    """A call's arguments with their names, those left out included."""
    if not isinstance(node.target, OpOverload):
        yield from (("", value) for value in (*node.args, *node.kwargs.values()))
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            yield argument.name, node.args[place]
        elif argument.name in node.kwargs:
            yield argument.name, node.kwargs[argument.name]
        elif argument.has_default_value():
            yield argument.name, argument.default_value


def nodes_in(value: Any) -> Iterator[Node]:
    """Every node in a nested argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_in(item)


def reads(node: Node) -> list[Read]:
    """The floating-point tensors that a node reads."""
    looked_at = LOOKED_AT.get(base(node), ())
    return [Read(name, one) for name, value in bound(node) if name not in looked_at for one in nodes_in(value) if values(one)]


def base(node: Node) -> str:
    """The name of the op that a node calls, before a policy's registry is asked for it."""
    return canonical(node.target._schema.name.partition("::")[2]) if isinstance(node.target, OpOverload) else ""


def op_name(node: Node) -> str | None:
    """The name under which policies know a node's op."""
    return _op_name(node.target, registry().generation) if isinstance(node.target, OpOverload) else None


@lru_cache(maxsize=4096)
def _op_name(target: OpOverload[..., Any], _generation: int) -> str | None:
    bare = canonical(target._schema.name.partition("::")[2])
    return bare if target.namespace == "aten" and bare in STRUCTURAL else registry().name_of(target)


def role(node: Node, half: torch.dtype) -> Role:
    """What a node is; placeholders are told apart by who plans, and ops that write in place are fixed there too."""
    if node.op == "output":
        return Role.OUTPUT
    if node.op != "call_function" or not (values(node) or reads(node)):
        return Role.SILENT
    if node.target is operator.getitem:
        return Role.ELEMENT
    if isinstance(node.target, HigherOrderOperator) or not isinstance(node.target, OpOverload):
        return Role.FIXED
    return _role_of_op(node, half)


def _role_of_op(node: Node, half: torch.dtype) -> Role:
    name = base(node) if node.target.namespace == "aten" else ""  # type: ignore[union-attr]
    if name in LOOKS:
        return Role.SILENT
    if is_foreign(node, half):
        return Role.FIXED
    if name in CASTS:
        return Role.CAST
    if name in FILLS:
        return Role.FILL
    return Role.OP if op_name(node) is not None else Role.FIXED


def is_foreign(node: Node, half: torch.dtype) -> bool:
    """Whether an op computes in a dtype that is neither float32 nor the 16-bit one, or has no float32 in it at all."""
    dtypes = {one.dtype for one in values(node)} | {one.dtype for read in reads(node) for one in values(read.node)}
    return not dtypes <= {torch.float32, half} or torch.float32 not in dtypes


def said_dtype(node: Node) -> torch.dtype | None:
    """The dtype that the user wrote in a call (`softmax(x, dtype=torch.float32)`), which stands."""
    told = dict(bound(node)).get("dtype")
    return told if isinstance(told, torch.dtype) else None


def deciding(node: Node) -> list[Read]:
    """The reads that take part in the precision of an op: not a batch norm's parameters, and no single numbers beside whole tensors."""
    exempt = MIXED_PARAMETERS.get(op_name(node) or "", frozenset())
    able = [read for read in reads(node) if read.argument not in exempt]
    whole = [read for read in able if any(one.dim() for one in values(read.node))]
    return whole or able
