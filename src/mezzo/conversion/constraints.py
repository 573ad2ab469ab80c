"""Ops whose precision is fixed before the minimum cut, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo._dtypes import dtype_name
from mezzo._errors import RefusedOpError
from mezzo._torch import HigherOrderOperator
from mezzo.conversion.nodes import (
    CASTS,
    RECURRENT_STATE,
    REWRITTEN,
    STRUCTURAL,
    VALUE_PRESERVING,
    Role,
    aten_name,
    deciding,
    delicate_ops,
    op_name,
    reads,
    role_of,
    stated_dtype,
    values,
    written,
)
from mezzo.conversion.normalize import REGION_META
from mezzo.conversion.options import ConvertOptions, condition, exclusion, module_rule, out_of_range
from mezzo.conversion.plan import CastBytes
from mezzo.policy.missing_kernels import lacks_kernel
from mezzo.policy.types import Level, Rule


@dataclass(frozen=True)
class Constraint:
    """A precision that is settled, or none, and why."""

    half: bool | None
    """True for 16 bits, False for float32, None where the cut may choose."""
    reason: str


UNDECIDED = Constraint(None, "in no list")
"""Left to the cut."""

AS_AUTOCAST = Constraint(False, "reads float32, as under torch.autocast")
"""Not for the cut: it would be less precise than under torch.autocast."""

RECURRENT = Constraint(
    False, "carries a state from step to step, in float32 as under torch.autocast"
)
"""Its weights may be rounded: torch.autocast rounds them too."""

GATHERED = Constraint(True, "picks rows of a table that is stored in 16 bits")
"""Its rows are exact copies of the stored ones; what reads them decides in which precision it
computes."""


def constraint_of(
    node: Node, name: str, role: Role, said: ConvertOptions, modules: Mapping[str, nn.Module]
) -> Constraint:
    """Settle one op: exclusions first, then the conversion's own lists, then the policy's."""
    if role is not Role.OP:
        return UNDECIDED
    found = _by_options(node, name, said) or _by_policy(node, said, modules)
    if found.half is False:
        return found
    return Constraint(False, why) if (why := _unfit(node, said)) else found


def _by_options(node: Node, name: str, said: ConvertOptions) -> Constraint | None:
    op = op_name(node) or ""
    if said.nothing_to_cast:
        return Constraint(False, said.nothing_to_cast)
    if pattern := exclusion(said, node, name):
        return Constraint(False, f"excluded by {pattern!r}")
    if node.meta.get(REGION_META) == "off":
        return Constraint(False, "in a region of the model that switches autocast off")
    if (dtype := stated_dtype(node)) is not None and values(node):
        return Constraint(dtype is not torch.float32, f"the call says dtype={dtype_name(dtype)}")
    if why := condition(said.conditional, op, node):
        return Constraint(False, why)
    if op in said.half:
        return Constraint(True, "listed half in the call")
    return Constraint(False, "listed full in the call") if op in said.full else None


def _by_policy(node: Node, said: ConvertOptions, modules: Mapping[str, nn.Module]) -> Constraint:
    op = op_name(node) or ""
    if (ruled := module_rule(said, node, modules)) is not None:
        rule, reason = ruled
        return UNDECIDED if rule is Rule.KEEP else Constraint(rule is Rule.HALF, reason)
    if op in STRUCTURAL:
        return UNDECIDED
    if why := condition(said.lists.conditional, op, node):
        return Constraint(False, why)
    entry = said.entry(op)
    if op in said.policy.refuse:
        raise RefusedOpError(
            f"The policy refuses {op}, which the graph calls at {node.name}. Take the op out of the"
            " model, or of refuse=."
        )
    if entry.rule is Rule.HALF and _is_recurrent(op, said):
        return RECURRENT
    if entry.rule in (Rule.HALF, Rule.FULL, Rule.REFUSE):
        return Constraint(entry.rule is Rule.HALF, entry.reason)
    if op not in said.lists.entries and op in delicate_ops():
        return Constraint(False, delicate_ops()[op])
    return UNDECIDED


def _is_recurrent(op: str, said: ConvertOptions) -> bool:
    """Whether a layer carries a state that torch.autocast would keep in float32, and nobody asks for 16 bits."""
    asked = said.policy.level is Level.O3 or op in said.policy.ops_with_rule(Rule.HALF)
    return op in RECURRENT_STATE and said.device == "cpu" and not asked


def _unfit(node: Node, said: ConvertOptions) -> str | None:
    op = op_name(node) or ""
    if lacks_kernel(op, said.dtype, said.device):
        return f"it has no {dtype_name(said.dtype)} kernel on {said.device}"
    return out_of_range(node, said.dtype)


def moved_bytes(value: torch.Tensor, source: torch.dtype, target: torch.dtype) -> int:
    """The bytes that casting a tensor reads and writes; a dynamic size counts as in the example."""
    count = 1
    for size in value.shape:
        count *= (
            size.node.hint
            if isinstance(size, torch.SymInt) and size.node.hint is not None
            else 1
            if isinstance(size, torch.SymInt)
            else size
        )
    return count * (source.itemsize + target.itemsize)


def autocast_dtypes(
    roles: Mapping[Node, Role], half_by: Callable[[Node], bool | None], half: torch.dtype
) -> dict[Node, bool]:
    """For each node that makes floating-point values, whether autocast would make them in 16 bits; `half_by` holds what lists say, None follows the inputs."""
    found: dict[Node, bool] = {}
    for node, role in roles.items():
        made = values(node)
        if not made:
            found[node] = _autocast_dtype(node, half_by(node), found) if role is Role.OP else False
        elif role is Role.ELEMENT and made[0].dtype is torch.float32:
            found[node] = found.get(node.args[0], False)  # type: ignore[arg-type]
        elif role is Role.OP and any(one.dtype is torch.float32 for one in made):
            found[node] = _autocast_dtype(node, half_by(node), found)
        else:
            found[node] = made[0].dtype is half
    return found


def _autocast_dtype(node: Node, listed: bool | None, found: Mapping[Node, bool]) -> bool:  # noqa: FBT001
    if listed is not None:
        return listed
    seen = [found.get(read.node, False) for read in deciding(node)]
    return bool(seen) and all(seen)


def autocast_casts(
    roles: Mapping[Node, Role], rule_of: Callable[[Node], Rule], half: torch.dtype
) -> CastBytes:
    """The casts that torch.autocast makes on a graph: each call casts its inputs, and only weights are remembered."""
    rules = {node: rule_of(node) for node, role in roles.items() if role is Role.OP}
    made = autocast_dtypes(
        roles,
        lambda node: {Rule.HALF: True, Rule.FULL: False}.get(rules.get(node, Rule.KEEP)),
        half,
    )
    total, remembered = CastBytes(), set[Node]()
    for node, role in roles.items():
        for read, target in _asked(node, role, rules, made, half):
            source = half if made.get(read) else torch.float32
            if (
                read in remembered
                or source is target
                or values(read)[0].dtype not in (torch.float32, half)
            ):
                continue
            if roles.get(read) is Role.WEIGHT:
                remembered.add(read)
            total += CastBytes(1, moved_bytes(values(read)[0], source, target))
    return total


def _asked(
    node: Node, role: Role, rules: Mapping[Node, Rule], made: Mapping[Node, bool], half: torch.dtype
) -> Iterable[tuple[Node, torch.dtype]]:
    if role is Role.CAST and values(node) and values(node)[0].dtype in (torch.float32, half):
        return [(read.node, values(node)[0].dtype) for read in reads(node)]
    match rules.get(node):
        case Rule.HALF:
            return [(read.node, half) for read in reads(node)]
        case Rule.FULL:
            return [(read.node, torch.float32) for read in reads(node)]
        case Rule.PROMOTE:
            return [(read.node, half if made[node] else torch.float32) for read in reads(node)]
    return []


@dataclass(frozen=True)
class GraphFacts:
    """What is known of a graph before the cut."""

    roles: Mapping[Node, Role]
    """What each node is, in the graph's order."""
    pins: Mapping[Node, Constraint]
    """The precision of each op, settled or open."""
    written: frozenset[Node]
    """Nodes whose memory the graph writes."""


def graph_facts(
    module: GraphModule,
    prefix: str,
    weights: Mapping[Node, str],
    said: ConvertOptions,
    modules: Mapping[str, nn.Module],
) -> GraphFacts:
    """Read a graph: roles, then what lists and words settle, then what follows from that.

    `weights` holds the placeholders whose stored dtype can be chosen, each with what forbids 16
    bits, or nothing.
    """
    touched = written(module.graph)
    roles = {node: _role(node, weights, touched, said.dtype) for node in module.graph.nodes}
    listed = {
        node: constraint_of(node, prefix + node.name, one, said, modules)
        for node, one in roles.items()
    }
    listed = {
        node: _fixed(node, roles[node], touched) or _overflow(node, roles, found, weights) or found
        for node, found in listed.items()
    }
    as_autocast = autocast_dtypes(roles, lambda node: listed[node].half, said.dtype)
    return GraphFacts(roles, _followed(roles, listed, as_autocast, said), touched)


def _role(
    node: Node, weights: Collection[Node], touched: Collection[Node], half: torch.dtype
) -> Role:
    if node.op == "placeholder":
        if not values(node):
            return Role.SILENT
        return (
            Role.WEIGHT
            if node in weights and node not in touched and values(node)[0].dtype is torch.float32
            else Role.INPUT
        )
    found = role_of(node, half)
    if found in (Role.OP, Role.CAST, Role.FILL) and node in touched:
        return Role.FIXED
    return (
        Role.FIXED
        if found in (Role.OP, Role.FILL)
        and (node.meta.get(REGION_META) == "kept" or REWRITTEN in node.meta)
        else found
    )


def _fixed(node: Node, found: Role, touched: Collection[Node]) -> Constraint | None:
    """Why a node keeps the dtypes that it was exported with."""
    if found is not Role.FIXED:
        return None
    if node in touched:
        return Constraint(False, "its memory is written in place, so it keeps its dtype")
    if node.meta.get(REGION_META) == "kept":
        return Constraint(False, "in a mezzo region of the model, which has settled its dtype")
    if REWRITTEN in node.meta:
        return Constraint(False, node.meta[REWRITTEN].reason)
    if aten_name(node) in CASTS:
        return Constraint(False, "the model's own cast")
    if isinstance(node.target, HigherOrderOperator):
        return Constraint(False, "calls bodies that have rows of their own, or that are left alone")
    if op_name(node) is None:
        return Constraint(False, "not an op that mezzo knows: it keeps its dtypes")
    return Constraint(
        False,
        (
            f"already {dtype_name(values(node)[0].dtype)}: left alone"
            if values(node)
            else "left alone"
        ),
    )


def _overflow(
    node: Node, roles: Mapping[Node, Role], found: Constraint, weights: Mapping[Node, str]
) -> Constraint | None:
    """Why an op's weights keep it in float32: `weights` says for each what is wrong with its numbers, or nothing."""
    if roles[node] is not Role.OP or found.half is False:
        return None
    faults = [weights[read.node] for read in deciding(node) if weights.get(read.node)]
    return Constraint(False, faults[0]) if faults else None


def _followed(
    roles: Mapping[Node, Role],
    listed: Mapping[Node, Constraint],
    as_autocast: Mapping[Node, bool],
    said: ConvertOptions,
) -> dict[Node, Constraint]:
    """Settle what torch.autocast would run in float32, so that nothing is less precise than there.

    Only an op that gives the same numbers when its result is rounded later stays open, if everybody
    who reads the result rounds it.
    """
    settled = dict(listed)
    rounded: dict[Node, bool] = {}
    for node, found in reversed(list(roles.items())):
        rounded[node] = bool(node.users) and all(
            _rounds(user, node, roles, settled, rounded, said.dtype) for user in node.users
        )
        open_ended = found in (Role.OP, Role.FILL) or (
            found is Role.INPUT and not said.keep_io_dtypes and node.op == "placeholder"
        )
        if (
            not open_ended
            or listed[node].half is not None
            or (as_autocast[node] and found is Role.OP)
        ):
            continue
        exact = found is not Role.OP or op_name(node) in VALUE_PRESERVING
        if not (exact and rounded[node]):
            settled[node] = AS_AUTOCAST
    return settled


def _rounds(
    user: Node,
    node: Node,
    roles: Mapping[Node, Role],
    settled: Mapping[Node, Constraint],
    rounded: Mapping[Node, bool],
    half: torch.dtype,
) -> bool:
    match roles[user]:
        case Role.SILENT:
            return True
        case Role.ELEMENT:
            return rounded[user]
        case Role.CAST:
            return bool(values(user)) and values(user)[0].dtype is half
        case Role.OP:
            if stated_dtype(user) is not None or all(
                read.node is not node for read in deciding(user)
            ):
                return False
            return settled[user].half is True or (settled[user] is UNDECIDED and rounded[user])
    return False
