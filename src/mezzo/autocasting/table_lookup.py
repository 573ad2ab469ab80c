"""Published tables of cast actions, and the lookups that compiled code makes in them.

Dynamo takes a result as a constant of the code it compiles and guards on the key of the table. The
table of a key never changes. Results are strings and booleans, since other types would need guards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any, ClassVar
from weakref import WeakValueDictionary, finalize

import torch

from mezzo._torch import loaded
from mezzo.autocasting import composites
from mezzo.autocasting.composites import is_python_function
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.op_table import EMPTY, CastAction, Table
from mezzo.policy import missing_kernels
from mezzo.policy.policy import Policy
from mezzo.policy.registry import Function, registry

TABLES: dict[str, Table] = {"": EMPTY}
"""Published tables by key; the empty key stands for torch's own lists."""

EXPORT_KEY = "/export/"
"""Part of the keys of tables that leave nothing to torch's own lists."""

_lock = RLock()
"""Held while tables are published and withdrawn. Reentrant: the garbage collector may withdraw a
table while another is being made."""


def publish(key: str, table: Table) -> None:
    """Publish a table under the key by which modes and compiled code look it up."""
    TABLES[key] = table


class PolicyTable:
    """A policy's table, published while this object lives; a region holds a reference.

    Regions with equal policies share one table, and so the code that was compiled for it.
    """

    _alive: ClassVar[WeakValueDictionary[str, PolicyTable]] = WeakValueDictionary()

    def __init__(self, key: str, policy: Policy, table: Table) -> None:
        self.key, self.policy = key, policy
        publish(key, table)
        finalize(self, _withdraw, key, table)

    @classmethod
    def shared(cls, key: str, policy: Policy, make: Callable[[], Table]) -> PolicyTable:
        """Return the table of a key; make it if no region holds it."""
        with _lock:
            table = cls._alive.get(key)
            if table is None:
                table = cls._alive[key] = cls(key, policy, make())
            return table

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyTable:
        """Return itself: copies of a region share its table."""
        return self

    def keep_alive(self) -> None:
        """Keep the table for the life of the process: compiled code holds only its key."""
        _kept_alive[self.key] = self


_kept_alive: dict[str, PolicyTable] = {}


def _withdraw(key: str, table: Table) -> None:
    with _lock:
        # An equal policy may have been published again in the meantime.
        if TABLES.get(key) is table:
            del TABLES[key]


@dynamo_constant
def register_with_dynamo() -> None:
    """Let dynamo call function modes for every function that a table can contain.

    By default it calls them only for functions that torch lists as overridable. The builtins of
    torch's C++ modules that Python functions call are not listed, although modes see them in eager
    mode. Does nothing until dynamo is imported.
    """
    overridable_functions = loaded("dynamo_overridable_functions")
    if overridable_functions is not None:
        _add_overridable(overridable_functions)


@cache
def _add_overridable(overridable_functions: Function) -> None:
    overridable_functions().update(
        function
        for op in registry()
        for function in op.functions
        if not is_python_function(function)
    )


@dynamo_constant
def rule_of(key: str, function: Function) -> str | None:
    """Return the rule for a function; None if torch's autocast handles it.

    `"decompose"` for a composite function, `"wrap"` for a higher-order operator.
    """
    register_with_dynamo()  # the region may have been entered before dynamo was imported
    action = TABLES[key].get(function)
    if action is None or action.casts_only_weights:
        return None
    if action.wraps_function:
        return "wrap"
    return "decompose" if action.is_composite else action.rule.value


@dynamo_constant
def operator_of(key: str, function: Function) -> str:
    """Return the name of a higher-order operator."""
    return TABLES[key][function].op


@dynamo_constant
def decomposed_name(function: Function) -> str:
    """Return the global of `composites` that holds the decomposed copy of a function."""
    return composites.decomposed_name(function)


@dynamo_constant
def refusal(key: str, function: Function) -> str:
    """Return the error message for a refused op."""
    return refusal_message(TABLES[key][function])


@dynamo_constant
def refuses_only_half(key: str, function: Function) -> bool:
    """Return whether a refused op may be called with float32."""
    return TABLES[key][function].refused_only_in_half


@dynamo_constant
def disables_torch_autocast(key: str, function: Function) -> bool:
    """Return whether torch's autocast is disabled while the function runs."""
    # torch.export ignores torch's autocast, and a region that disables it would stay in the graph.
    return TABLES[key][function].disables_torch_autocast and EXPORT_KEY not in key


@dynamo_constant
def is_exempt(key: str, function: Function, argument: int | str) -> bool:
    """Return whether an argument, by position or name, is exempt."""
    return any(argument in exempt for exempt in TABLES[key][function].exempt_args)


@dynamo_constant
def computes_in_float32(key: str, function: Function) -> bool:
    """Return whether the op is computed in float32 if an exempt argument is float32."""
    return TABLES[key][function].computes_in_float32


@dynamo_constant
def has_conditions(key: str, function: Function) -> bool:
    """Return whether the value of an argument can make the op run in float32."""
    return bool(TABLES[key][function].conditions)


@dynamo_constant
def is_condition(key: str, function: Function, argument: int | str, value: Any) -> bool:
    """Return whether an argument has a value for which the op runs in float32."""
    return any(
        argument in (condition.position, condition.name) and value in condition.values
        for condition in TABLES[key][function].conditions
    )


@dynamo_constant
def is_condition_by_default(key: str, function: Function, positional: int, named: str) -> bool:
    """Return whether the default of an omitted argument makes the op run in float32.

    `positional` is the number of positional arguments, `named` the names of the keyword arguments
    separated by spaces.
    """
    return any(
        condition.is_met_by_default
        for condition in TABLES[key][function].conditions
        if not 0 <= condition.position < positional and condition.name not in named.split()
    )


@dynamo_constant
def takes_dtype(key: str, function: Function) -> bool:
    """Return whether the function has a `dtype` argument."""
    return TABLES[key][function].takes_dtype


@dynamo_constant
def is_in_place_argument(key: str, function: Function, argument: int | str) -> bool:
    """Return whether an argument is the one that requests writing into the input."""
    in_place = TABLES[key][function].in_place
    return in_place is not None and argument in in_place


@dynamo_constant
def lacks_kernel(key: str, function: Function, dtype: torch.dtype, device: str) -> bool:
    """Return whether a failed call has shown that the op has no 16-bit kernel."""
    return missing_kernels.is_recorded_missing(TABLES[key][function].op, dtype, device)


def refusal_message(action: CastAction) -> str:
    """Return the error message for a refused op; the reason contains the remedy."""
    return f"The policy refuses {action.op}: {action.reason}."
