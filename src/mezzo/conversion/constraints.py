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
    deciding_reads,
    dtype_argument,
    float32_ops,
    float_values,
    mutated_nodes,
    named_arguments,
    op_name,
    reads,
    role_of,
)
from mezzo.conversion.normalize import REGION_META
from mezzo.conversion.options import (
    ConvertOptions,
    matching_condition,
    matching_exclusion,
    module_rule,
    out_of_range,
)
from mezzo.conversion.plan import CastBytes
from mezzo.policy.missing_kernels import lacks_kernel
from mezzo.policy.types import Level, Rule


@dataclass(frozen=True)
class Constraint:
    """The precision of a node before the minimum cut, and why."""

    half: bool | None
    """True for 16 bits, False for float32, None if the cut decides."""
    reason: str
    may_narrow: bool = False
    """Whether 16 bits give the same result where every reader of it rounds it."""


UNDECIDED = Constraint(None, "in no list")
"""Left to the minimum cut."""

AS_AUTOCAST = Constraint(False, "reads float32, as under torch.autocast")
"""Not left to the cut: 16 bits would be less precise than torch.autocast."""

RECURRENT = Constraint(
    False, "carries a state from step to step, in float32 as under torch.autocast"
)
"""The weights may be rounded nevertheless: torch.autocast rounds them too."""

GATHERED = Constraint(True, "selects rows of a table that is stored in 16 bits")
"""The rows are exact copies of the stored ones; their readers decide in which precision they
compute."""


NARROWED = Constraint(True, "computes in float32 inside, and its readers round the result")
"""The result of float32 and a cast, without writing float32."""


@dataclass(frozen=True)
class GraphFacts:
    """What is known about a graph before the minimum cut."""

    roles: Mapping[Node, Role]
    """The role of each node, in graph order."""
    constraints: Mapping[Node, Constraint]
    """The constraint of each node."""
    mutated: frozenset[Node]
    """Nodes whose memory the graph mutates."""


def graph_facts(
    module: GraphModule,
    prefix: str,
    weights: Mapping[Node, str],
    options: ConvertOptions,
    modules: Mapping[str, nn.Module],
) -> GraphFacts:
    """Find the roles of a graph's nodes, the constraints from lists, and those that follow.

    `weights` maps the placeholders whose stored dtype can be chosen to the reason why they cannot
    be stored in 16 bits, or to an empty string.
    """
    mutated = mutated_nodes(module.graph)
    roles = {node: _role(node, weights, mutated, options.dtype) for node in module.graph.nodes}
    constraints = {
        node: constraint_of(node, prefix + node.name, role, options, modules)
        for node, role in roles.items()
    }
    constraints = {
        node: _fixed_constraint(node, roles[node], mutated)
        or _overflow_constraint(node, roles[node], found, weights)
        or found
        for node, found in constraints.items()
    }
    as_autocast = autocast_dtypes(roles, lambda node: constraints[node].half, options.dtype)
    constraints = _keep_autocast_precision(roles, constraints, as_autocast, options)
    return GraphFacts(roles, constraints, mutated)


# Roles


def _role(
    node: Node, weights: Collection[Node], mutated: Collection[Node], half_dtype: torch.dtype
) -> Role:
    if node.op == "placeholder":
        if not float_values(node):
            return Role.NO_FLOATS
        is_float32 = float_values(node)[0].dtype is torch.float32
        is_weight = node in weights and node not in mutated and is_float32
        return Role.WEIGHT if is_weight else Role.INPUT
    role = role_of(node, half_dtype)
    if role in (Role.OP, Role.CAST, Role.FILL) and node in mutated:
        return Role.FIXED
    keeps_dtype = node.meta.get(REGION_META) == "kept" or REWRITTEN in node.meta
    return Role.FIXED if role in (Role.OP, Role.FILL) and keeps_dtype else role


# Constraints from the options and the policy


def constraint_of(
    node: Node, name: str, role: Role, options: ConvertOptions, modules: Mapping[str, nn.Module]
) -> Constraint:
    """Return the constraint of one op: from exclusions, then the call's lists, then the policy."""
    if role is not Role.OP:
        return UNDECIDED
    found = _from_options(node, name, options) or _from_policy(node, options, modules)
    if found.half is False:
        return found
    reason = _half_not_possible(node, options)
    return Constraint(False, reason) if reason else found


def _from_options(node: Node, name: str, options: ConvertOptions) -> Constraint | None:
    op = op_name(node) or ""
    if options.nothing_to_cast:
        return Constraint(False, options.nothing_to_cast)
    if pattern := matching_exclusion(options, node, name):
        return Constraint(False, f"excluded by {pattern!r}")
    if node.meta.get(REGION_META) == "off":
        return Constraint(False, "in a region of the model that disables autocast")
    if (dtype := dtype_argument(node)) is not None and float_values(node):
        return Constraint(dtype is not torch.float32, f"the call has dtype={dtype_name(dtype)}")
    if reason := matching_condition(options.conditional, op, node):
        return Constraint(False, reason)
    if op in options.half:
        return Constraint(True, "listed half in the call")
    return Constraint(False, "listed full in the call") if op in options.full else None


def _from_policy(
    node: Node, options: ConvertOptions, modules: Mapping[str, nn.Module]
) -> Constraint:
    op = op_name(node) or ""
    if (ruled := module_rule(options, node, modules)) is not None:
        rule, reason = ruled
        return UNDECIDED if rule is Rule.KEEP else Constraint(rule is Rule.HALF, reason)
    if op in STRUCTURAL:
        return UNDECIDED
    if condition := matching_condition(options.lists.conditional, op, node):
        return Constraint(False, condition)
    entry = options.entry(op)
    if op in options.policy.refuse:
        raise RefusedOpError(
            f"The policy refuses {op}, which the graph calls at {node.name}. Take the op out of the"
            " model, or of refuse=."
        )
    if entry.rule is Rule.HALF and _keeps_float32_state(op, options):
        return RECURRENT
    if entry.rule in (Rule.HALF, Rule.FULL, Rule.REFUSE):
        may_narrow = entry.rule is Rule.FULL and _rounds_once(node, options)
        return Constraint(entry.rule is Rule.HALF, entry.reason, may_narrow)
    if entry.rule is Rule.FLOAT32_INSIDE:
        return Constraint(None, "listed float32_inside")
    if op not in options.lists.entries and op in float32_ops():
        return Constraint(False, float32_ops()[op], _rounds_once(node, options))
    return UNDECIDED


def _rounds_once(node: Node, options: ConvertOptions) -> bool:
    """Return whether the 16-bit kernel of an op computes in float32 and rounds at the end.

    A softmax over another dimension than the last one rounds twice on CPUs.
    """
    if op_name(node) != "softmax" or "softmax" in options.policy.ops_with_rule(Rule.FULL):
        return False
    dim = dict(named_arguments(node)).get("dim")
    is_last = isinstance(dim, int) and dim in (-1, float_values(node)[0].dim() - 1)
    return is_last and _half_not_possible(node, options) is None


def _keeps_float32_state(op: str, options: ConvertOptions) -> bool:
    """Return whether a recurrent layer keeps its state in float32, as under torch.autocast.

    A policy that lists the layer as half, or level O3, overrides this.
    """
    overridden = options.policy.level is Level.O3 or op in options.policy.ops_with_rule(Rule.HALF)
    return op in RECURRENT_STATE and options.device == "cpu" and not overridden


def _half_not_possible(node: Node, options: ConvertOptions) -> str | None:
    op = op_name(node) or ""
    if lacks_kernel(op, options.dtype, options.device):
        return f"it has no {dtype_name(options.dtype)} kernel on {options.device}"
    return out_of_range(node, options.dtype)


# Constraints that follow from the graph


def _fixed_constraint(node: Node, role: Role, mutated: Collection[Node]) -> Constraint | None:
    """Return why a node keeps the dtypes with which it was exported, or None."""
    if role is not Role.FIXED:
        return None
    if node in mutated:
        return Constraint(False, "its memory is mutated in place, so it keeps its dtype")
    if node.meta.get(REGION_META) == "kept":
        return Constraint(False, "in a mezzo region of the model, which has chosen its dtype")
    if REWRITTEN in node.meta:
        return Constraint(False, node.meta[REWRITTEN].reason)
    if aten_name(node) in CASTS:
        return Constraint(False, "the model's own cast")
    if isinstance(node.target, HigherOrderOperator):
        return Constraint(False, "calls subgraphs that have rows of their own, or keep their dtype")
    if op_name(node) is None:
        return Constraint(False, "not an op that mezzo knows: it keeps its dtypes")
    results = float_values(node)
    return Constraint(
        False, f"already {dtype_name(results[0].dtype)}: left alone" if results else "left alone"
    )


def _overflow_constraint(
    node: Node, role: Role, found: Constraint, weights: Mapping[Node, str]
) -> Constraint | None:
    """Return a float32 constraint for an op whose weights do not fit the 16-bit dtype, or None."""
    if role is not Role.OP or found.half is False:
        return None
    reasons = [weights[read.node] for read in deciding_reads(node) if weights.get(read.node)]
    return Constraint(False, reasons[0]) if reasons else None


def _keep_autocast_precision(
    roles: Mapping[Node, Role],
    listed: Mapping[Node, Constraint],
    as_autocast: Mapping[Node, bool],
    options: ConvertOptions,
) -> dict[Node, Constraint]:
    """Constrain ops that torch.autocast runs in float32, so that none is less precise than there.

    A value-preserving op stays undecided if every reader of its result rounds it anyway. An op that
    reads 16 bits and computes in float32 inside is then narrowed: a softmax that feeds a product.
    """
    constraints = dict(listed)
    rounded: dict[Node, bool] = {}
    for node, role in reversed(list(roles.items())):
        rounded[node] = bool(node.users) and all(
            _rounds(user, node, roles, constraints, rounded, options.dtype) for user in node.users
        )
        can_choose = role in (Role.OP, Role.FILL) or (
            role is Role.INPUT and not options.keep_io_dtypes and node.op == "placeholder"
        )
        reads_half = bool(reads(node)) and all(as_autocast[read.node] for read in reads(node))
        if listed[node].may_narrow and rounded[node] and reads_half:
            constraints[node] = NARROWED
        half_in_autocast = as_autocast[node] and role is Role.OP
        if not can_choose or listed[node].half is not None or half_in_autocast:
            continue
        exact = role is not Role.OP or op_name(node) in VALUE_PRESERVING
        if not (exact and rounded[node]):
            constraints[node] = AS_AUTOCAST
    return constraints


def _rounds(
    user: Node,
    node: Node,
    roles: Mapping[Node, Role],
    constraints: Mapping[Node, Constraint],
    rounded: Mapping[Node, bool],
    half_dtype: torch.dtype,
) -> bool:
    """Return whether a reader rounds the value of a node to the 16-bit dtype."""
    match roles[user]:
        case Role.NO_FLOATS:
            return True
        case Role.ELEMENT:
            return rounded[user]
        case Role.CAST:
            return bool(float_values(user)) and float_values(user)[0].dtype is half_dtype
        case Role.OP:
            decides = any(read.node is node for read in deciding_reads(user))
            if dtype_argument(user) is not None or not decides:
                return False
            constraint = constraints[user]
            return constraint.half is True or (constraint is UNDECIDED and rounded[user])
    return False


# What torch.autocast does on the same graph


def autocast_dtypes(
    roles: Mapping[Node, Role],
    listed_half: Callable[[Node], bool | None],
    half_dtype: torch.dtype,
) -> dict[Node, bool]:
    """Return for each node whether its float values would be 16-bit under autocast.

    `listed_half` returns the precision from the op lists, or None if the op follows its inputs.
    """
    is_half: dict[Node, bool] = {}
    for node, role in roles.items():
        results = float_values(node)
        if not results:
            is_half[node] = (
                _autocast_dtype(node, is_half, listed=listed_half(node))
                if role is Role.OP
                else False
            )
        elif role is Role.ELEMENT and results[0].dtype is torch.float32:
            is_half[node] = is_half.get(node.args[0], False)  # type: ignore[arg-type]
        elif role is Role.OP and any(result.dtype is torch.float32 for result in results):
            is_half[node] = _autocast_dtype(node, is_half, listed=listed_half(node))
        else:
            is_half[node] = results[0].dtype is half_dtype
    return is_half


def _autocast_dtype(node: Node, is_half: Mapping[Node, bool], *, listed: bool | None) -> bool:
    if listed is not None:
        return listed
    inputs = [is_half.get(read.node, False) for read in deciding_reads(node)]
    return bool(inputs) and all(inputs)


def autocast_casts(
    roles: Mapping[Node, Role], rule_of: Callable[[Node], Rule], half_dtype: torch.dtype
) -> CastBytes:
    """Count the casts of torch.autocast: each call casts its inputs, and weights are cached."""
    rules = {node: rule_of(node) for node, role in roles.items() if role is Role.OP}
    is_half = autocast_dtypes(
        roles,
        lambda node: {Rule.HALF: True, Rule.FULL: False}.get(rules.get(node, Rule.KEEP)),
        half_dtype,
    )
    total, cached = CastBytes(), set[Node]()
    for node, role in roles.items():
        for value, target in _autocast_reads(node, role, rules, is_half, half_dtype):
            source = half_dtype if is_half.get(value) else torch.float32
            traced = float_values(value)[0]
            if (
                value in cached
                or source is target
                or traced.dtype not in (torch.float32, half_dtype)
            ):
                continue
            if roles.get(value) is Role.WEIGHT:
                cached.add(value)
            total += CastBytes(1, cast_bytes(traced, source, target))
    return total


def _autocast_reads(
    node: Node,
    role: Role,
    rules: Mapping[Node, Rule],
    is_half: Mapping[Node, bool],
    half_dtype: torch.dtype,
) -> Iterable[tuple[Node, torch.dtype]]:
    """Return the values that a node casts under torch.autocast, each with the target dtype."""
    results = float_values(node)
    if role is Role.CAST and results and results[0].dtype in (torch.float32, half_dtype):
        return [(read.node, results[0].dtype) for read in reads(node)]
    match rules.get(node):
        case Rule.HALF:
            return [(read.node, half_dtype) for read in reads(node)]
        case Rule.FULL:
            return [(read.node, torch.float32) for read in reads(node)]
        case Rule.PROMOTE:
            dtype = half_dtype if is_half[node] else torch.float32
            return [(read.node, dtype) for read in reads(node)]
    return []


def cast_bytes(value: torch.Tensor, source: torch.dtype, target: torch.dtype) -> int:
    """Return the bytes that a cast reads and writes; a dynamic size counts as in the example."""
    count = 1
    for size in value.shape:
        if not isinstance(size, torch.SymInt):
            count *= size
        elif size.node.hint is not None:
            count *= size.node.hint
    return count * (source.itemsize + target.itemsize)
