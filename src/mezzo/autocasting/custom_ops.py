"""Ops of the user's own: a function or a custom operator gets a name and a rule, and policies can speak of it."""

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
    """Give a function or a custom operator a name and a rule.

    Inside a region its inputs are cast as the rule says, and its body runs without further casts. A
    policy that lists the name overrides the rule. Use what comes back: it is the function that
    knows of regions. A custom operator comes back as it is.

    >>> @register_op("scaled_add", rule="full")
    ... def scaled_add(x, y):
    ...     return x + 2 * y
    """
    if function is None or isinstance(function, str):
        return lambda decorated: register_op(decorated, function or name, rule)
    if not callable(function):
        raise PolicyError(f"register_op takes a function or a custom operator, got {function!r}.")
    chosen = _name(function, name)
    entry = Entry(Rule.parse(rule), "registered by the user")
    if isinstance(function, CustomOpDef | OpOverload | OpOverloadPacket):
        registry().register(chosen, _spellings(function), entry)
        return function
    wrapper = _aware(chosen, function)
    registry().register(chosen, (wrapper,), entry)
    publish(
        _own_table(chosen),
        {} if entry.rule is Rule.KEEP else {wrapper: CastAction(chosen, entry.rule, entry.reason)},
    )
    return wrapper


def _name(function: Any, name: str | None) -> str:
    chosen = name or canonical(getattr(function, "__name__", "") or getattr(function, "_name", ""))
    if not chosen or not isinstance(chosen, str):
        raise PolicyError(
            f"{function!r} needs a name that policies can call it by: register_op(function,"
            " name=...)."
        )
    return chosen


def _spellings(
    operator: CustomOpDef | OpOverload[..., Any] | OpOverloadPacket[..., Any],
) -> tuple[Any, ...]:
    overload = operator._opoverload if isinstance(operator, CustomOpDef) else operator
    packet = overload.overloadpacket if isinstance(overload, OpOverload) else overload
    return (packet, *(getattr(packet, name) for name in packet.overloads()))


def _aware(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """A function that asks for the region it is called in. It needs no mode, so that default regions stay free of one."""
    alone = _own_table(name)

    @wraps(function)
    def aware(*args: P.args, **kwargs: P.kwargs) -> R:
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
        steering = active_mode(device)
        key = steering.key if steering is not None and steering.key else alone
        result: R
        if is_dynamo_compiling():
            rule = rule_of(key, aware)
            result = (
                function(*args, **kwargs)
                if rule is None
                else apply_rule_traced(key, device, rule, aware, args, kwargs, function)
            )
            return result
        action = TABLES[key].get(aware)
        if action is None:
            return function(*args, **kwargs)
        result = (steering or AutocastMode(device, "")).apply_rule(function, action, args, kwargs)
        return result

    return aware


@dynamo_constant
def _has_autocast(device: str) -> bool:
    """torch's question, which dynamo does not trace in torch 2.11."""
    return torch.amp.is_autocast_available(device)


def _own_table(name: str) -> str:
    """The key of the table that holds for an op where torch's own lists are the policy."""
    return f"registered/{name}"
