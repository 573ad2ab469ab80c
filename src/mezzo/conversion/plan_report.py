"""Report on a plan: one row per node, and the casts before and after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from mezzo._dtypes import CASTABLE_DTYPES, dtype_name
from mezzo.conversion.assignment import WEIGHT_NAME
from mezzo.conversion.constraints import GATHERED, RECURRENT, autocast_casts, cast_bytes
from mezzo.conversion.export import source_line
from mezzo.conversion.nodes import CASTS, REWRITTEN, Role, aten_name, float_values, op_name, reads
from mezzo.conversion.options import ConvertOptions, module_paths
from mezzo.conversion.plan import CastBytes, GraphRow
from mezzo.conversion.planner import PlannedGraph
from mezzo.conversion.subgraphs import Subgraph
from mezzo.policy.decide import COMPOSED_OF
from mezzo.policy.presets.torch_amp import torch_entries
from mezzo.policy.types import Rule

_WEIGHT = "weight"


def plan_rows(subgraphs: Iterable[Subgraph], errors: Mapping[Node, float]) -> tuple[GraphRow, ...]:
    """Return one row per node with floating-point values: ops first, then stored tensors.

    `errors` holds the relative errors of the weights that are stored in 16 bits only.
    """
    rows = [row for subgraph in subgraphs for row in _subgraph_rows(subgraph, errors)]
    return tuple(sorted(rows, key=lambda row: row.op == _WEIGHT))


def _subgraph_rows(subgraph: Subgraph, errors: Mapping[Node, float]) -> Iterator[GraphRow]:
    planned = subgraph.planned
    for node, role in planned.assignment.roles.items():
        if role in (Role.NO_FLOATS, Role.ELEMENT, Role.OUTPUT):
            continue
        dtype, reason = _dtype_and_reason(node, role, planned)
        if REWRITTEN in node.meta:
            reason = node.meta[REWRITTEN].reason
        elif node in errors:
            reason = _rounding_reason(node, planned, errors[node])
        kind = (
            _WEIGHT
            if node in planned.stored
            else _op(node)
            if role in (Role.OP, Role.FIXED)
            else role.value
        )
        yield GraphRow(
            subgraph.prefix + node.name, kind, _module(node), source_line(node), dtype, reason
        )


def _op(node: Node) -> str:
    return node.meta[REWRITTEN].op if REWRITTEN in node.meta else op_name(node) or str(node.target)


def _dtype_and_reason(node: Node, role: Role, planned: PlannedGraph) -> tuple[str, str]:
    assignment = planned.assignment
    match role:
        case Role.WEIGHT:
            stored = assignment.stored(node)
            reason = (
                "stored in the dtype in which it is read"
                if len(stored) == 1
                else "stored twice: it is read in both dtypes"
            )
            return " + ".join(map(dtype_name, stored)), reason
        case Role.INPUT:
            reason = (
                "mutated by the graph"
                if node in planned.mutated
                else "stored as the model has it"
                if node in planned.stored
                else "an input"
            )
            return dtype_name(assignment.dtype_of(node)), reason
        case Role.CAST:
            return _result_dtype(node, planned), "the model's own cast"
        case Role.FILL:
            return _result_dtype(node, planned), "created in the dtype in which it is read"
    constraint = planned.constraints[node]
    if constraint.half is not None:
        return _compute_dtype(node, planned), constraint.reason
    chosen = "16 bits here cast" if assignment.in_half.get(node) else "float32 here casts"
    return _compute_dtype(node, planned), f"{constraint.reason}: {chosen} the fewest bytes"


def _rounding_reason(weight: Node, planned: PlannedGraph, error: float) -> str:
    reader = next(
        user for user in weight.users if planned.constraints[user] in (GATHERED, RECURRENT)
    )
    return (
        f"stored in 16 bits: largest relative error of a row {error:.1e}; exclude={reader.name!r}"
        " keeps float32"
    )


def _result_dtype(node: Node, planned: PlannedGraph) -> str:
    return (
        dtype_name(planned.assignment.dtype_of(node))
        if float_values(node)
        else str(node.meta["val"].dtype).removeprefix("torch.")
    )


def _compute_dtype(node: Node, planned: PlannedGraph) -> str:
    results, assignment = float_values(node), planned.assignment
    if assignment.roles[node] is Role.OP and (not results or results[0].dtype is torch.float32):
        in_half = assignment.in_half.get(node)
        return dtype_name(assignment.half_dtype if in_half else torch.float32)
    return dtype_name(results[0].dtype) if results else "–"


def _module(node: Node) -> str:
    paths = module_paths(node)
    return paths[-1] if paths else str(node.meta.get(WEIGHT_NAME, ""))


def casts_before(subgraphs: Iterable[Subgraph], options: ConvertOptions) -> CastBytes:
    """Count the casts of torch.autocast on the device of the conversion."""
    listed = torch_entries(options.device)

    def rule_of(node: Node) -> Rule:
        op = op_name(node) or ""
        for name in (op, *COMPOSED_OF.get(op, ())):
            if name in listed:
                return listed[name].rule
        return Rule.KEEP

    return sum(
        (
            autocast_casts(subgraph.planned.assignment.roles, rule_of, options.dtype)
            for subgraph in subgraphs
        ),
        CastBytes(),
    )


def casts_after(module: GraphModule) -> CastBytes:
    """Count the casts of a graph and its subgraphs; one to the same dtype does not count."""
    total = CastBytes()
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and aten_name(node) in CASTS:
                    total += _cast(node)
    return total


def _cast(node: Node) -> CastBytes:
    results = float_values(node)
    read = [value for read in reads(node) for value in float_values(read.node)]
    if not results or not read:
        return CastBytes()
    source, target = read[0].dtype, results[0].dtype
    if source is target or not CASTABLE_DTYPES.issuperset({source, target}):
        return CastBytes()
    return CastBytes(1, cast_bytes(results[0], source, target))
