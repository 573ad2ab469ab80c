"""A plan's rows, told for people: which node, where it comes from, its dtype and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import Node

from mezzo._dtypes import dtype_name
from mezzo.graph.lists import module_paths
from mezzo.graph.nodes import REWRITTEN, Role, op_name, values
from mezzo.graph.origin import source_line
from mezzo.graph.pins import CARRIES, GATHERED
from mezzo.graph.plan import GraphRow
from mezzo.graph.planning import Planned
from mezzo.graph.sections import Section
from mezzo.graph.weights import NAME

_WEIGHT = "weight"


def rows(sections: Iterable[Section], errors: Mapping[Node, float]) -> tuple[GraphRow, ...]:
    """Return a row for each node that a dtype was decided for or kept: what computes first, then what is stored.

    `errors` holds the relative errors of weights that are stored in 16 bits whatever their readers want.
    """
    found = [row for section in sections for row in _section_rows(section, errors)]
    return tuple(sorted(found, key=lambda row: row.op == _WEIGHT))


def _section_rows(section: Section, errors: Mapping[Node, float]) -> Iterator[GraphRow]:
    planned = section.planned
    for node, role in planned.choice.roles.items():
        if role in (Role.SILENT, Role.ELEMENT, Role.OUTPUT):
            continue
        dtype, reason = _decided(node, role, planned)
        if REWRITTEN in node.meta:
            reason = node.meta[REWRITTEN].reason
        elif node in errors:
            reason = _rounding(node, planned, errors[node])
        kind = _WEIGHT if node in planned.stored else _op(node) if role in (Role.OP, Role.FIXED) else role.value
        yield GraphRow(section.prefix + node.name, kind, _module(node), source_line(node), dtype, reason)


def _op(node: Node) -> str:
    return node.meta[REWRITTEN].op if REWRITTEN in node.meta else op_name(node) or str(node.target)


def _decided(node: Node, role: Role, planned: Planned) -> tuple[str, str]:
    choice = planned.choice
    match role:
        case Role.WEIGHT:
            stored = choice.stored(node)
            told = "stored for those who read it" if len(stored) == 1 else "stored twice: its readers disagree"
            return " + ".join(map(dtype_name, stored)), told
        case Role.INPUT:
            told = "written by the graph" if node in planned.written else "stored as the model has it" if node in planned.stored else "an input"
            return dtype_name(choice.made(node)), told
        case Role.CAST:
            return _made(node, planned), "the model's own cast"
        case Role.FILL:
            return _made(node, planned), "made in the dtype that it is read in"
    pin = planned.pins[node]
    if pin.half is not None:
        return _computed(node, planned), pin.reason
    lowered = choice.halves.get(node)
    return _computed(node, planned), "in no list: 16 bits here cast the fewest bytes" if lowered else "in no list: float32 here casts the fewest bytes"


def _rounding(weight: Node, planned: Planned, error: float) -> str:
    reader = next(user for user in weight.users if planned.pins[user] in (GATHERED, CARRIES))
    return f"stored in 16 bits: largest relative error of a row {error:.1e}; exclude={reader.name!r} keeps float32"


def _made(node: Node, planned: Planned) -> str:
    made = values(node)
    return dtype_name(planned.choice.made(node)) if made else str(node.meta["val"].dtype).removeprefix("torch.")


def _computed(node: Node, planned: Planned) -> str:
    made = values(node)
    if planned.choice.roles[node] is Role.OP and (not made or made[0].dtype is torch.float32):
        return dtype_name(planned.choice.half if planned.choice.halves.get(node) else torch.float32)
    return dtype_name(made[0].dtype) if made else "–"


def _module(node: Node) -> str:
    paths = module_paths(node)
    return paths[-1] if paths else str(node.meta.get(NAME, ""))
