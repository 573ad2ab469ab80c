"""The tables by their keys, and the questions that compiled code asks of them.

Dynamo takes an answer as a constant of the code it compiles; it guards on the key, and what a key
names never changes. Answers are strings and booleans: anything else would carry guards of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any, ClassVar
from weakref import WeakValueDictionary, finalize

import torch

from mezzo._torch import loaded
from mezzo.autocasting.composites import body_name, has_body
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.op_table import EMPTY, CastAction, Table
from mezzo.policy import missing_kernels
from mezzo.policy.policy import Policy
from mezzo.policy.registry import Function, registry

TABLES: dict[str, Table] = {"": EMPTY}

EXPORT_KEY = "/alone/"
"""Stands in the keys of tables that leave nothing to torch's own lists."""


_lock = RLock()
"""Held while tables come and go. Reentrant: a table may be withdrawn by the garbage collector
while another is being made."""


def publish(key: str, table: Table) -> None:
    """Make a table known under the key that modes and compiled code name it by."""
    TABLES[key] = table


class PolicyTable:
    """A policy's table, published for as long as this object lives: a region holds it.

    Two regions of the same policy share one, and compiled code that was made in one of them serves
    the other.
    """

    _alive: ClassVar[WeakValueDictionary[str, PolicyTable]] = WeakValueDictionary()

    def __init__(self, key: str, policy: Policy, table: Table) -> None:
        self.key, self.policy = key, policy
        publish(key, table)
        finalize(self, _withdraw, key, table)

    @classmethod
    def of(cls, key: str, policy: Policy, make: Callable[[], Table]) -> PolicyTable:
        """Give the table with this key, which is made if no region has it."""
        with _lock:
            found = cls._alive.get(key)
            if found is None:
                found = cls._alive[key] = cls(key, policy, make())
            return found

    def __deepcopy__(self, memo: dict[int, Any]) -> PolicyTable:
        """Copies of a region share its table."""
        return self

    def keep(self) -> None:
        """Keep it for the life of the process: compiled code knows the key alone, and may come back to it at any time."""
        _kept[self.key] = self


_kept: dict[str, PolicyTable] = {}


def _withdraw(key: str, table: Table) -> None:
    with _lock:
        # The same policy may have been published again meanwhile.
        if TABLES.get(key) is table:
            del TABLES[key]


@dynamo_constant
def register_with_dynamo() -> None:
    """Let dynamo ask a mode about every function that a table can name, once it is there to be told.

    It asks only about those that torch lists as overridable, and what Python functions call inside
    `torch._C._nn` is not listed, though a mode hears of it in eager.
    """
    asked = loaded("dynamo_overridable_functions")
    if asked is not None:
        _register(asked)


@cache
def _register(asked: Function) -> None:
    asked().update(
        function for op in registry() for function in op.functions if not has_body(function)
    )


@dynamo_constant
def rule_of(key: str, function: Function) -> str | None:
    """The rule for a function; `"open"` for a composite that is opened, `"carried"` where a function is steered inside, None for what torch does by itself."""
    register_with_dynamo()  # who entered the region before dynamo was imported has told nobody
    action = TABLES[key].get(function)
    if action is None or action.weights:
        return None
    if action.wraps_function:
        return "carried"
    return "open" if action.is_composite else action.rule.value


@dynamo_constant
def operator_of(key: str, function: Function) -> str:
    """The name of an operator that takes a function."""
    return TABLES[key][function].op


@dynamo_constant
def body_of(function: Function) -> str:
    """The name under which a composite's body lies in `bodies`."""
    return body_name(function)


@dynamo_constant
def refusal(key: str, function: Function) -> str:
    """What to say when a refused op is called."""
    return refused(TABLES[key][function])


@dynamo_constant
def refuses_halves_alone(key: str, function: Function) -> bool:
    """Whether a refused op may be called with float32."""
    return TABLES[key][function].halves_alone


@dynamo_constant
def disables_torch_autocast(key: str, function: Function) -> bool:
    """Whether torch's own autocast is off while the function runs."""
    # An export that dynamo traces hears no torch region, and would keep the one that silences it as
    # a part of the graph.
    return TABLES[key][function].disables_torch_autocast and EXPORT_KEY not in key


@dynamo_constant
def is_exempt(key: str, function: Function, argument: int | str) -> bool:
    """Whether an argument, by position or name, is left alone."""
    return any(argument in place for place in TABLES[key][function].exempt_args)


@dynamo_constant
def computes_in_float32(key: str, function: Function) -> bool:
    """Whether the op is computed in float32 where an argument that is left alone is float32 beside 16-bit inputs."""
    return TABLES[key][function].computes_in_float32


@dynamo_constant
def has_conditions(key: str, function: Function) -> bool:
    """Whether an argument's value can make the op run in float32."""
    return bool(TABLES[key][function].conditions)


@dynamo_constant
def is_condition(key: str, function: Function, argument: int | str, value: Any) -> bool:
    """Whether an argument has a value for which the op runs in float32."""
    return any(
        argument in (place, name) and value in values
        for place, name, values, _ in TABLES[key][function].conditions
    )


@dynamo_constant
def is_condition_by_default(key: str, function: Function, positional: int, named: str) -> bool:
    """Whether an argument that a call leaves out has a value, by default, for which the op runs in float32. `named` is the names it gives, with spaces."""
    left_out = [
        by_default
        for place, name, _, by_default in TABLES[key][function].conditions
        if not (0 <= place < positional or name in named.split())
    ]
    return any(left_out)


@dynamo_constant
def takes_dtype(key: str, function: Function) -> bool:
    """Whether the caller may name the dtype of the result."""
    return TABLES[key][function].takes_dtype


@dynamo_constant
def asks_in_place(key: str, function: Function, argument: int | str) -> bool:
    """Whether an argument is the one that asks to write into the input."""
    place = TABLES[key][function].in_place
    return place is not None and argument in place


@dynamo_constant
def lacks_kernel(key: str, function: Function, dtype: torch.dtype, device: str) -> bool:
    """Whether a call has shown that the op has no 16-bit kernel."""
    return missing_kernels.is_recorded_missing(TABLES[key][function].op, dtype, device)


def refused(action: CastAction) -> str:
    """The message of a refusal: which op, and what to do."""
    return f"The policy refuses {action.op}: {action.reason}."
