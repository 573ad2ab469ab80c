"""The casts of a graph, counted: as torch.autocast would make them, and as they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from mezzo._dtypes import CASTABLE_DTYPES
from mezzo.graph.follow import autocast_casts, moved_bytes
from mezzo.graph.lists import Words
from mezzo.graph.nodes import base, op_name, reads, values
from mezzo.graph.plan import CastBytes
from mezzo.graph.sections import Section
from mezzo.graph.traits import CASTS
from mezzo.policy.decide import MADE_OF
from mezzo.policy.presets.torch_amp import native
from mezzo.policy.types import Rule


def casts_before(sections: Iterable[Section], said: Words) -> CastBytes:
    """What torch.autocast would cast on the device of a conversion."""
    listed = native(said.device)

    def rule_of(node: Node) -> Rule:
        op = op_name(node) or ""
        for name in (op, *MADE_OF.get(op, ())):
            if name in listed:
                return listed[name].rule
        return Rule.KEEP

    return sum((autocast_casts(section.planned.choice.roles, rule_of, said.dtype) for section in sections), CastBytes())


def casts_after(module: GraphModule) -> CastBytes:
    """What a graph and its bodies cast; a conversion to the dtype that a tensor has is none."""
    total = CastBytes()
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and base(node) in CASTS:
                    total += _cast(node)
    return total


def _cast(node: Node) -> CastBytes:
    made, read = values(node), [one for read in reads(node) for one in values(read.node)]
    if not made or not read:
        return CastBytes()
    source, target = read[0].dtype, made[0].dtype
    if source is target or not CASTABLE_DTYPES.issuperset({source, target}):
        return CastBytes()
    return CastBytes(1, moved_bytes(made[0], source, target))
