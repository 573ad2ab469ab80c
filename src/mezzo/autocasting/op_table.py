"""Make the table of cast actions of a policy, by the functions that a function mode sees.

Functions that torch's own autocast handles as the policy requires are not in the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from mezzo._torch import get_schema, has_kernel, kernels_of
from mezzo.autocasting.composites import (
    can_decompose,
    decomposed,
    is_composite,
    is_python_function,
)
from mezzo.autocasting.dynamo import REFUSAL, WRAPPED_OPERATORS, higher_order_operators
from mezzo.policy.decide import effective_lists, entry_of
from mezzo.policy.missing_kernels import RECURRENT, needs_one_dtype
from mezzo.policy.policy import Policy
from mezzo.policy.presets.torch_amp import AUTOCAST_KEYS, torch_entries
from mezzo.policy.registry import (
    Function,
    Op,
    aten_overloads,
    functional_overloads,
    parameters,
    registry,
)
from mezzo.policy.types import Entry, OpLists, Rule

Value = str | int | float | bool | None


class Argument(NamedTuple):
    """An argument of a function."""

    position: int
    """-1 if it cannot be passed by position."""
    name: str


class Condition(NamedTuple):
    """Values of an argument for which an op runs in float32."""

    position: int
    name: str
    values: tuple[Value, ...]
    is_met_by_default: bool
    """Whether the default of the argument is one of the values."""


@dataclass(frozen=True)
class CastAction:
    """What happens when a function is called in a region."""

    op: str
    rule: Rule
    reason: str
    disables_torch_autocast: bool = True
    """Run with torch's autocast disabled, which would cast again inside."""
    exempt_args: tuple[Argument, ...] = ()
    """Arguments that neither decide the dtype nor are cast to 16 bits."""
    computes_in_float32: bool = False
    """The device's kernel rejects a float32 exempt argument with 16-bit inputs: compute in float32,
    and cast the result to 16 bits."""
    refused_only_in_half: bool = False
    """Refuse only 16-bit inputs."""
    conditions: tuple[Condition, ...] = ()
    takes_dtype: bool = False
    """The function has a `dtype` argument, which overrides the rule."""
    in_place: Argument | None = None
    """The argument that requests writing into the input."""
    is_composite: bool = False
    """Run the decomposed copy, so that the ops inside are seen."""
    wraps_function: bool = False
    """A higher-order operator: run its function under the mode."""
    casts_only_weights: bool = False
    """torch's autocast casts the activations; cached casts replace the weights."""
    cached: bool = False
    """Use the region's weight cache."""

    @cached_property
    def has_fixed_rule(self) -> bool:
        """Whether the rule does not depend on the arguments of a call."""
        return not (self.conditions or self.takes_dtype or self.in_place)


Table = Mapping[Function, CastAction]

EMPTY: Table = {}

_BACKWARD: tuple[Function, ...] = (
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)


def make_table(
    policy: Policy,
    dtype: torch.dtype,
    device: str,
    *,
    versioned: bool,
    without_torch_autocast: bool = False,
) -> Table:
    """Make the table of a policy on a device.

    `versioned` uses mezzo's weight cache. `without_torch_autocast` leaves nothing to torch's lists,
    for torch.export, which ignores them.
    """
    lists = effective_lists(policy, dtype, device)
    torch_lists = {} if without_torch_autocast else torch_entries(device)
    # torch casts the weights of these into one buffer. Casts made here would be separate tensors,
    # which cuDNN compacts at every call with a warning.
    left_to_torch = (
        RECURRENT
        if device == "cuda" and dtype is torch.float16 and not without_torch_autocast
        else frozenset()
    )
    actions: dict[Function, CastAction] = {}
    for op in registry():
        entry = entry_of(lists, op.name, dtype, device)
        if op.name in left_to_torch and entry.rule is Rule.HALF:
            continue
        for function in op.functions:
            action = _action(op, function, entry, lists, torch_lists, device, versioned=versioned)
            if action is not None:
                actions[function] = action
    if actions:
        actions |= _composites(lists, actions)
        actions |= {
            function: _operator(name) for function, name in higher_order_operators().items()
        }
        # Backward runs in the precision that forward saved, not by torch's lists.
        reason = "gradients are computed in the precision of forward"
        actions |= dict.fromkeys(_BACKWARD, CastAction("backward", Rule.KEEP, reason))
    return actions


def _action(
    op: Op,
    function: Function,
    entry: Entry,
    lists: OpLists,
    torch_lists: Mapping[str, Entry],
    device: str,
    *,
    versioned: bool,
) -> CastAction | None:
    """Return the action for a function of an op; None if torch's autocast does the same."""
    if _writes_in_place(function) and entry.rule is not Rule.REFUSE:
        return None
    if op.name not in lists.entries and is_composite(op.name, function):
        return None
    exempt = _arguments(function, lists.exempt_args.get(op.name, ()))
    conditions = _conditions(op, function, lists)
    torch_rule = (
        torch_lists[op.name].rule
        if op.name in torch_lists and _is_cast_by_torch(function, device)
        else Rule.KEEP
    )
    if entry.rule is torch_rule and not exempt and not conditions:
        return _weights_action(op, entry) if versioned and entry.rule is Rule.HALF else None
    if _has_nothing_to_cast(op, entry.rule) and not conditions and torch_rule is Rule.KEEP:
        return None
    return CastAction(
        op.name,
        entry.rule,
        entry.reason,
        disables_torch_autocast=_may_cast_inside(op, function),
        exempt_args=exempt,
        computes_in_float32=bool(exempt) and needs_one_dtype(op.name, device),
        refused_only_in_half=op.name in lists.refused_in_half,
        conditions=conditions,
        takes_dtype="dtype" in parameters(function),
        in_place=next(iter(_arguments(function, ("inplace",))), None),
        cached=versioned,
    )


def _weights_action(op: Op, entry: Entry) -> CastAction:
    """Return the action for an op that torch casts, with weights from mezzo's cache."""
    return CastAction(
        op.name,
        entry.rule,
        entry.reason,
        disables_torch_autocast=False,
        casts_only_weights=True,
        cached=True,
    )


def _conditions(op: Op, function: Function, lists: OpLists) -> tuple[Condition, ...]:
    return tuple(
        Condition(
            *_argument(function, condition.argument),
            condition.values,
            _default_of(function, condition.argument) in condition.values,
        )
        for condition in lists.conditional
        if condition.op == op.name
    )


def _operator(name: str) -> CastAction:
    if name in WRAPPED_OPERATORS:
        return CastAction(
            name, Rule.KEEP, "the policy applies in its function", wraps_function=True
        )
    return CastAction(name, Rule.REFUSE, REFUSAL)


def _composites(lists: OpLists, known: Table) -> dict[Function, CastAction]:
    """Return actions that decompose composite functions without their own rule.

    Also Python wrappers of a builtin that is in the table while the wrapper is not.
    """
    ops_in_table = frozenset(action.op for action in known.values())
    reason = "composed of several ops, each with its own rule"
    actions: dict[Function, CastAction] = {}
    for op in registry():
        for function in op.functions:
            if function in known or op.name in lists.entries:
                continue
            if is_composite(op.name, function) or (
                op.name in ops_in_table and can_decompose(op.name, function)
            ):
                decomposed(function)  # compiled code must find the copy
                actions[function] = CastAction(op.name, Rule.KEEP, reason, is_composite=True)
    return actions


@cache
def _writes_in_place(function: Function) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in ("__invert__", "__iter__", "__init__")
    )


def _has_nothing_to_cast(op: Op, rule: Rule) -> bool:
    """Return whether a rule casts nothing: KEEP, and PROMOTE of an op with a single tensor."""
    return rule is Rule.KEEP or (rule is Rule.PROMOTE and op.name in _single_tensor_ops())


def _may_cast_inside(op: Op, function: Function) -> bool:
    """Return whether torch's autocast would cast inside a call of the function."""
    return (
        is_python_function(function)
        or op.entry is not None
        or op.name in _composite_ops()
        or any(op.name in torch_entries(device) for device in ("cpu", "cuda"))
    )


def _is_cast_by_torch(function: Function, device: str) -> bool:
    """Return whether torch's autocast has kernels for all functional overloads of a function.

    torch registers overloads one by one, and lacks some on CPU (`_convolution`).
    """
    overloads = (
        frozenset()
        if is_python_function(function)
        else functional_overloads(getattr(function, "__name__", ""))
    )
    return overloads <= _registered(device)


@cache
def _registered(device: str) -> frozenset[str]:
    return frozenset(kernels_of(AUTOCAST_KEYS.get(device, "AutocastPrivateUse1")))


@cache
def _composite_ops() -> frozenset[str]:
    """Return the ops that C++ composes of others, on which torch's autocast acts."""
    qualified = (
        (name, f"aten::{base}.{overload}".rstrip("."))
        for name, overloads in aten_overloads().items()
        for base, overload in overloads
    )
    key = "CompositeImplicitAutograd"
    return frozenset(name for name, overload in qualified if has_kernel(overload, key))


@cache
def _single_tensor_ops() -> frozenset[str]:
    """Return the ops with at most one tensor argument in all overloads."""
    return frozenset(
        name
        for name, overloads in aten_overloads().items()
        if all(_tensors(base, overload) <= 1 for base, overload in overloads)
    )


def _tensors(base: str, overload: str) -> float:
    schema = get_schema(f"aten::{base}", overload)
    types = [str(argument.type) for argument in schema.arguments if not argument.is_out]
    if any("List[" in name and "Tensor" in name for name in types):
        return float("inf")
    return sum("Tensor" in name for name in types)


def _arguments(function: Function, names: tuple[str, ...]) -> tuple[Argument, ...]:
    return tuple(_argument(function, name) for name in names if name in parameters(function))


def _argument(function: Function, name: str) -> Argument:
    known = parameters(function)
    return Argument(known.index(name) if name in known else -1, name)


def _default_of(function: Function, name: str) -> object:
    """Return the default of an argument."""
    try:
        default: object = inspect.signature(function).parameters[name].default
    except (ValueError, TypeError, KeyError):
        schemas = (
            get_schema(*qualified.partition(".")[::2])
            for qualified in functional_overloads(getattr(function, "__name__", ""))
        )
        default = next(
            (
                argument.default_value
                for schema in schemas
                for argument in schema.arguments
                if argument.name == name
            ),
            None,
        )
    return default
