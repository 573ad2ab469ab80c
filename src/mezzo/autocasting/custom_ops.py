"""`mezzo.register_op`: give a function or a custom operator a name and a rule for policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # not in its __all__

from mezzo._errors import PolicyError
from mezzo._torch import OpOverload, OpOverloadPacket, pytree
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.function_mode import AutocastMode, active_mode, apply_rule_traced
from mezzo.autocasting.op_table import CastAction
from mezzo.autocasting.table_lookup import TABLES, publish, rule_of
from mezzo.policy.op_names import canonical
from mezzo.policy.registry import registry
from mezzo.policy.types import Entry, Rule

P = ParamSpec("P")
R = TypeVar("R")


@overload
def register_op(
    function: Callable[P, R], name: str | None = None, rule: str | Rule = Rule.KEEP
) -> Callable[P, R]: ...
@overload
def register_op(
    function: str | None = None, name: str | None = None, rule: str | Rule = Rule.KEEP
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def register_op(function: Any = None, name: str | None = None, rule: str | Rule = Rule.KEEP) -> Any:
    """Register a function or a custom operator as an op with a rule.

    In a region the floating-point inputs of the op are cast by its rule (`"half"`, `"full"`,
    `"promote"`, `"keep"` or `"refuse"`), and its body runs without further casts. A policy that
    lists the name overrides the rule. As a decorator it takes the name, which is by default that of
    the function. Registering a name again replaces the op.

    Call the returned function: it checks for a region. A custom operator (`torch.library.custom_op`
    or `torch.ops...`) is returned unchanged.

    >>> import mezzo
    >>> @mezzo.register_op("scaled_add", rule="full")
    ... def scaled_add(x, y):
    ...     return x + 2 * y
    >>> x = torch.ones(2, dtype=torch.bfloat16)
    >>> with mezzo.autocast("cpu", dtype="bfloat16"):
    ...     scaled_add(x, x).dtype
    torch.float32
    >>> with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16", half={"scaled_add"}):
    ...     scaled_add(x, x).dtype
    torch.bfloat16
    """
    if function is None or isinstance(function, str):
        return lambda decorated: register_op(decorated, function or name, rule)
    if not callable(function):
        raise PolicyError(f"register_op takes a function or a custom operator, got {function!r}.")
    op = _op_name(function, name)
    entry = Entry(Rule.parse(rule), "registered by the user")
    if isinstance(function, CustomOpDef | OpOverload | OpOverloadPacket):
        registry().register(op, _overloads(function), entry)
        return function
    wrapper = _wrap(op, function)
    registry().register(op, (wrapper,), entry)
    action = CastAction(op, entry.rule, entry.reason)
    publish(_table_key(op), {} if entry.rule is Rule.KEEP else {wrapper: action})
    return wrapper


def _op_name(function: Any, name: str | None) -> str:
    op = name or canonical(getattr(function, "__name__", "") or getattr(function, "_name", ""))
    if not op or not isinstance(op, str):
        raise PolicyError(
            f"{function!r} has no name that policies can use. Pass one: register_op(function,"
            " name=...)."
        )
    return op


def _overloads(
    operator: CustomOpDef | OpOverload[..., Any] | OpOverloadPacket[..., Any],
) -> tuple[Any, ...]:
    """Return everything that calls a custom operator: its packet and all overloads."""
    overload = operator._opoverload if isinstance(operator, CustomOpDef) else operator
    packet = overload.overloadpacket if isinstance(overload, OpOverload) else overload
    return (packet, *(getattr(packet, name) for name in packet.overloads()))


def _wrap(op: str, function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it applies its rule in a region.

    It needs no function mode, so that regions with torch's own lists have none.
    """
    default_key = _table_key(op)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(
            (
                leaf.device.type
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor)
            ),
            None,
        )
        if device is None or not _has_autocast(device) or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        mode = active_mode(device)
        key = mode.table_key if mode is not None and mode.table_key else default_key
        result: R
        if is_dynamo_compiling():
            rule = rule_of(key, wrapper)
            result = (
                function(*args, **kwargs)
                if rule is None
                else apply_rule_traced(key, device, rule, wrapper, args, kwargs, function)
            )
            return result
        action = TABLES[key].get(wrapper)
        if action is None:
            return function(*args, **kwargs)
        result = (mode or AutocastMode(device, "")).apply_rule(function, action, args, kwargs)
        return result

    return wrapper


@dynamo_constant
def _has_autocast(device: str) -> bool:
    """Return whether torch has autocast for a device, which dynamo cannot trace in torch 2.11."""
    return torch.amp.is_autocast_available(device)


def _table_key(op: str) -> str:
    """Return the key of an op's table in regions with torch's own lists."""
    return f"registered/{op}"
