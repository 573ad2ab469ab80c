"""From the words a user writes to the parts of a policy, each refused with one clear error when it makes no sense."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

from mezzo._errors import PolicyError, choices, nearest
from mezzo.policy.registry import parameters, registry
from mezzo.policy.rule import BY_USER, Conditional, Rule
from mezzo.policy.selector import Selector

ConditionalWords = Conditional | tuple[Any, ...] | list[Any]
"""A conditional entry as a user writes it: `("softmax", "dim", [-1])`."""

MODULE_RULES = (Rule.HALF, Rule.FULL, Rule.KEEP)
"""What can be said of a whole module."""


def op_names(field: str, names: Collection[str] | str) -> frozenset[str]:
    """Read a set of op names in any of their spellings.

    >>> sorted(op_names("half", {"true_divide", "add"}))
    ['add', 'div']
    """
    if isinstance(names, str):
        raise PolicyError(f"{field}={names!r} should be a set of op names. Write {field}={{{names!r}}}.")
    if isinstance(names, Mapping) or not isinstance(names, Collection):
        raise PolicyError(f"{field}={names!r} should be a set of op names such as {{'softmax'}}.")
    return frozenset(registry().parse(name) for name in names)


def refuse_overlaps(lists: Mapping[str, frozenset[str]]) -> None:
    """Refuse an op that stands under two rules."""
    for (one, ones), (other, others) in combinations(lists.items(), 2):
        if both := sorted(ones & others):
            raise PolicyError(f"{', '.join(repr(name) for name in both)} stands in both {one}= and {other}=. An op has one rule: take it out of one of them.")


def exemptions(table: Mapping[str, Collection[str] | str] | tuple[Any, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read which arguments of which op are left alone."""
    if not isinstance(table, Mapping):
        table = dict(table)
    read = ((registry().parse(op), (names,) if isinstance(names, str) else tuple(sorted(names))) for op, names in table.items())
    return tuple(sorted((op, tuple(_argument(op, name) for name in names)) for op, names in read))


def conditionals(entries: Collection[ConditionalWords]) -> tuple[Conditional, ...]:
    """Read conditional entries: an op, one of its arguments, and the values for which it runs in float32."""
    return tuple(sorted((_conditional(entry) for entry in entries), key=repr))


def module_rules(table: Mapping[str | type, str | Rule] | tuple[Any, ...]) -> tuple[tuple[Selector, Rule], ...]:
    """Read module rules; their order is kept, since a later glob beats an earlier one."""
    if isinstance(table, str) or not isinstance(table, Mapping | tuple | list):
        raise PolicyError(f"modules={table!r} should be a table from a glob or a class to a rule, such as {{'head': 'half'}}.")
    pairs = table.items() if isinstance(table, Mapping) else table
    return tuple((Selector.parse(key), _module_rule(key, rule)) for key, rule in pairs)


def selectors(entries: Collection[str | type | Selector] | str | type) -> tuple[Selector, ...]:
    """Read a set of modules: globs and classes, one or several."""
    several = (entries,) if isinstance(entries, str | type | Selector) else entries
    return tuple(sorted({Selector.parse(entry) for entry in several}))


def spell(field: str, value: Any) -> str:
    """Spell a field's plain words as Python that the constructor reads: op names as a set, conditions as tuples."""
    if field in _SETS and value:
        return "{" + ", ".join(repr(name) for name in value) + "}"
    return repr([tuple(entry) for entry in value]) if field == "conditional" else repr(value)


_SETS = frozenset(rule.value for rule in Rule)


def _argument(op: str, name: str) -> str:
    known = {parameter for function in registry()[op].functions for parameter in parameters(function)}
    if not known or name in known:
        return name
    raise PolicyError(f"{op} has no argument {name!r}.{nearest(name, known)} {choices(sorted(known))}")


def _conditional(entry: ConditionalWords) -> Conditional:
    if isinstance(entry, Conditional):
        op, argument, values, reason = entry.op, entry.argument, entry.values, entry.reason
    elif isinstance(entry, tuple | list) and len(entry) in (3, 4):
        op, argument, values, reason = (*entry, BY_USER)[:4]
    else:
        raise PolicyError(f"A conditional entry is (op, argument, values), such as ('softmax', 'dim', [-1]), got {entry!r}.")
    name = registry().parse(op)
    listed = tuple(values) if isinstance(values, tuple | list | set | frozenset) else (values,)
    for value in listed:
        if value is not None and not isinstance(value, str | int | float | bool):
            raise PolicyError(f"The values of a conditional entry for {name!r} are strings, numbers, booleans or None, got {value!r}.")
    return Conditional(name, _argument(name, argument), listed, reason)


def _module_rule(key: Any, rule: str | Rule) -> Rule:
    parsed = Rule.parse(rule)
    if parsed in MODULE_RULES:
        return parsed
    raise PolicyError(f"A module cannot be {parsed.value!r} as a whole ({key!r}). {choices(one.value for one in MODULE_RULES)}")
