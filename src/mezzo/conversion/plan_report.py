"""Rows of a conversion plan, and how many casts it counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from mezzo._dtypes import CASTABLE_DTYPES, dtype_name
from mezzo.conversion.assignment import NAME
from mezzo.conversion.constraints import GATHERED, RECURRENT, autocast_casts, moved_bytes
from mezzo.conversion.export import source_line
from mezzo.conversion.nodes import CASTS, REWRITTEN, Role, aten_name, op_name, reads, values
from mezzo.conversion.options import ConvertOptions, module_paths
from mezzo.conversion.plan import CastBytes, GraphRow
from mezzo.conversion.planner import PlannedGraph
from mezzo.conversion.subgraphs import Subgraph
from mezzo.policy.decide import COMPOSED_OF
from mezzo.policy.presets.torch_amp import torch_entries
from mezzo.policy.types import Rule

_WEIGHT = "weight"


def rows(sections: Iterable[Subgraph], errors: Mapping[Node, float]) -> tuple[GraphRow, ...]:
    """Return a row for each node that a dtype was decided for or kept: what computes first, then what is stored.

    `errors` holds the relative errors of weights that are stored in 16 bits whatever their readers
    want.
    """
    found = [row for section in sections for row in _section_rows(section, errors)]
    return tuple(sorted(found, key=lambda row: row.op == _WEIGHT))


def _section_rows(section: Subgraph, errors: Mapping[Node, float]) -> Iterator[GraphRow]:
    planned = section.planned
    for node, role in planned.choice.roles.items():
        if role in (Role.SILENT, Role.ELEMENT, Role.OUTPUT):
            continue
        dtype, reason = _decided(node, role, planned)
        if REWRITTEN in node.meta:
            reason = node.meta[REWRITTEN].reason
        elif node in errors:
            reason = _rounding(node, planned, errors[node])
        kind = (
            _WEIGHT
            if node in planned.stored
            else _op(node)
            if role in (Role.OP, Role.FIXED)
            else role.value
        )
        yield GraphRow(
            section.prefix + node.name, kind, _module(node), source_line(node), dtype, reason
        )


def _op(node: Node) -> str:
    return node.meta[REWRITTEN].op if REWRITTEN in node.meta else op_name(node) or str(node.target)


def _decided(node: Node, role: Role, planned: PlannedGraph) -> tuple[str, str]:
    choice = planned.choice
    match role:
        case Role.WEIGHT:
            stored = choice.stored(node)
            told = (
                "stored for those who read it"
                if len(stored) == 1
                else "stored twice: its readers disagree"
            )
            return " + ".join(map(dtype_name, stored)), told
        case Role.INPUT:
            told = (
                "written by the graph"
                if node in planned.written
                else "stored as the model has it"
                if node in planned.stored
                else "an input"
            )
            return dtype_name(choice.dtype_of(node)), told
        case Role.CAST:
            return _made(node, planned), "the model's own cast"
        case Role.FILL:
            return _made(node, planned), "made in the dtype that it is read in"
    pin = planned.pins[node]
    if pin.half is not None:
        return _computed(node, planned), pin.reason
    lowered = choice.halves.get(node)
    return _computed(node, planned), (
        "in no list: 16 bits here cast the fewest bytes"
        if lowered
        else "in no list: float32 here casts the fewest bytes"
    )


def _rounding(weight: Node, planned: PlannedGraph, error: float) -> str:
    reader = next(user for user in weight.users if planned.pins[user] in (GATHERED, RECURRENT))
    return (
        f"stored in 16 bits: largest relative error of a row {error:.1e}; exclude={reader.name!r}"
        " keeps float32"
    )


def _made(node: Node, planned: PlannedGraph) -> str:
    made = values(node)
    return (
        dtype_name(planned.choice.dtype_of(node))
        if made
        else str(node.meta["val"].dtype).removeprefix("torch.")
    )


def _computed(node: Node, planned: PlannedGraph) -> str:
    made = values(node)
    if planned.choice.roles[node] is Role.OP and (not made or made[0].dtype is torch.float32):
        return dtype_name(planned.choice.half if planned.choice.halves.get(node) else torch.float32)
    return dtype_name(made[0].dtype) if made else "–"


def _module(node: Node) -> str:
    paths = module_paths(node)
    return paths[-1] if paths else str(node.meta.get(NAME, ""))


def casts_before(sections: Iterable[Subgraph], said: ConvertOptions) -> CastBytes:
    """What torch.autocast would cast on the device of a conversion."""
    listed = torch_entries(said.device)

    def rule_of(node: Node) -> Rule:
        op = op_name(node) or ""
        for name in (op, *COMPOSED_OF.get(op, ())):
            if name in listed:
                return listed[name].rule
        return Rule.KEEP

    return sum(
        (autocast_casts(section.planned.choice.roles, rule_of, said.dtype) for section in sections),
        CastBytes(),
    )


def casts_after(module: GraphModule) -> CastBytes:
    """What a graph and its bodies cast; a conversion to the dtype that a tensor has is none."""
    total = CastBytes()
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and aten_name(node) in CASTS:
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
