"""Read the user's arguments and TOML files as policy fields, and write them."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Mapping
from itertools import combinations
from math import isinf, isnan
from pathlib import Path
from typing import Any

from mezzo._errors import PolicyError, choices, nearest
from mezzo._files import write_text
from mezzo.policy.registry import parameters, registry
from mezzo.policy.types import BY_USER, Conditional, Rule, Selector

ConditionalArg = Conditional | tuple[Any, ...] | list[Any]
"""A conditional entry as a user writes it: `("softmax", "dim", [-1])`."""

MODULE_RULES = (Rule.HALF, Rule.FULL, Rule.KEEP)
"""What can be said of a whole module."""


def op_names(field: str, names: Collection[str] | str) -> frozenset[str]:
    """Read a set of op names in any of their spellings.

    >>> sorted(op_names("half", {"true_divide", "add"}))
    ['add', 'div']
    """
    if isinstance(names, str):
        raise PolicyError(
            f"{field}={names!r} should be a set of op names. Write {field}={{{names!r}}}."
        )
    if isinstance(names, Mapping) or not isinstance(names, Collection):
        raise PolicyError(f"{field}={names!r} should be a set of op names such as {{'softmax'}}.")
    return frozenset(registry().parse(name) for name in names)


def refuse_overlaps(lists: Mapping[str, frozenset[str]]) -> None:
    """Refuse an op that stands under two rules."""
    for (one, ones), (other, others) in combinations(lists.items(), 2):
        if both := sorted(ones & others):
            raise PolicyError(
                f"{one}= and {other}= both list {', '.join(repr(name) for name in both)}. An op has"
                " one rule: take it out of one of them."
            )


def exemptions(
    table: Mapping[str, Collection[str] | str] | tuple[Any, ...],
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read which arguments of which op are left alone."""
    read: dict[str, set[str]] = {}
    for op, names in _pairs(
        "exempt_args", table, "an op to its arguments, such as {'batch_norm': {'weight', 'bias'}}"
    ):
        name = registry().parse(op)
        read.setdefault(name, set()).update(check_argument(name, one) for one in _several(names))
    return tuple(sorted((name, tuple(sorted(names))) for name, names in read.items()))


def conditionals(entries: Collection[ConditionalArg]) -> tuple[Conditional, ...]:
    """Read conditional entries: an op, one of its arguments, and the values for which it runs in float32."""
    if isinstance(entries, str | Mapping) or not isinstance(entries, Collection):
        raise PolicyError(
            f"conditional={entries!r} should be a list of (op, argument, values), such as"
            " [('softmax', 'dim', [-1])]."
        )
    return tuple(sorted({_conditional(entry) for entry in entries}, key=repr))


def module_rules(
    table: Mapping[str | type, str | Rule] | tuple[Any, ...],
) -> tuple[tuple[Selector, Rule], ...]:
    """Read module rules; their order is kept, since a later glob beats an earlier one."""
    read: dict[Selector, Rule] = {}
    for key, word in _pairs(
        "modules", table, "a glob or a class to a rule, such as {'head': 'half'}"
    ):
        selector, rule = Selector.parse(key), _module_rule(key, word)
        if read.pop(selector, rule) is not rule:
            raise PolicyError(
                f"modules= has two rules for {selector.text!r}. A module has one: take the other"
                " out."
            )
        read[selector] = rule
    return tuple(read.items())


def selectors(entries: Collection[str | type | Selector] | str | type) -> tuple[Selector, ...]:
    """Read a set of modules: globs and classes, one or several."""
    several = (entries,) if isinstance(entries, str | type | Selector) else entries
    if isinstance(several, Mapping) or not isinstance(several, Collection):
        raise PolicyError(
            f"keep_full={entries!r} should be a set of globs and classes such as"
            " {'encoder.*.norm', nn.LayerNorm}."
        )
    return tuple(sorted({Selector.parse(entry) for entry in several}))


def format_value(field: str, value: Any) -> str:
    """Spell a field's plain words as Python that the constructor reads: op names as a set, conditions as tuples."""
    if field in _SETS and value:
        return "{" + ", ".join(repr(name) for name in value) + "}"
    return (
        f"[{', '.join(_format_condition(*entry) for entry in value)}]"
        if field == "conditional"
        else repr(value)
    )


_SETS = frozenset(rule.value for rule in Rule)


def check_argument(op: str, name: str) -> str:
    """Read the name of one of an op's arguments, or say which it has."""
    known = {
        parameter for function in registry()[op].functions for parameter in parameters(function)
    }
    if isinstance(name, str) and (not known or name in known):
        return name
    raise PolicyError(
        f"{op} has no argument {name!r}.{nearest(str(name), known)} {choices(sorted(known))}"
    )


def _format_condition(op: str, argument: str, values: list[Any], *reason: str) -> str:
    # Python prints infinity as a word that it does not read.
    spelled = ", ".join(
        f"float({str(value)!r})" if isinstance(value, float) and isinf(value) else repr(value)
        for value in values
    )
    return f"({', '.join([repr(op), repr(argument), f'[{spelled}]', *map(repr, reason)])})"


def _pairs(field: str, table: Any, meaning: str) -> list[tuple[Any, Any]]:
    """Read a table as a user writes it, or as a policy keeps it: a tuple of pairs."""
    pairs = list(table.items()) if isinstance(table, Mapping) else table
    if not isinstance(pairs, tuple | list) or any(
        not isinstance(pair, tuple | list) or len(pair) != len(("key", "value")) for pair in pairs
    ):
        raise PolicyError(f"{field}={table!r} should be a table from {meaning}.")
    return [(key, value) for key, value in pairs]


def _several(names: Any) -> tuple[Any, ...]:
    return tuple(names) if isinstance(names, list | tuple | set | frozenset) else (names,)


def _conditional(entry: ConditionalArg) -> Conditional:
    if isinstance(entry, Conditional):
        op, named, values, reason = entry.op, entry.argument, entry.values, entry.reason
    elif isinstance(entry, tuple | list) and len(entry) in (3, 4):
        op, named, values, reason = (*entry, BY_USER)[:4]
    else:
        raise PolicyError(
            "A conditional entry is (op, argument, values), such as ('softmax', 'dim', [-1]), got"
            f" {entry!r}."
        )
    name = registry().parse(op)
    for value in _several(values):
        if not (value is None or isinstance(value, str | int | float | bool)) or (
            isinstance(value, float) and isnan(value)
        ):
            raise PolicyError(
                f"The values of a conditional entry for {name!r} are strings, numbers, booleans or"
                f" None, got {value!r}."
            )
    if not isinstance(reason, str):
        raise PolicyError(
            f"The reason of a conditional entry for {name!r} is a sentence, got {reason!r}."
        )
    return Conditional(
        name, check_argument(name, named), tuple(sorted(set(_several(values)), key=repr)), reason
    )


def _module_rule(key: Any, rule: str | Rule) -> Rule:
    if isinstance(rule, Mapping):
        raise PolicyError(
            f"The module {key!r} has {rule!r} where a rule belongs. A name with dots is quoted in"
            ' TOML: "encoder.norm" = "full".'
        )
    parsed = Rule.parse(rule)
    if parsed in MODULE_RULES:
        return parsed
    raise PolicyError(
        f"A module cannot be {parsed.value!r} as a whole ({key!r})."
        f" {choices(one.value for one in MODULE_RULES)}"
    )


_HEADER = "# A mezzo policy: mezzo.Policy.load reads it.\n"


def save_toml(path: str | os.PathLike[str], words: Mapping[str, Any]) -> None:
    """Write a policy's words, whole or not at all."""
    lines = [
        f"{name} = {_value(value)}"
        for name, value in words.items()
        if not isinstance(value, Mapping)
    ]
    for name, table in words.items():
        if isinstance(table, Mapping):
            lines += [
                "",
                f"[{name}]",
                *(f"{_json(key)} = {_value(value)}" for key, value in table.items()),
            ]
    write_text(path, _HEADER + "\n".join(lines) + "\n")


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a policy's words, or say what is wrong with the file."""
    try:
        # utf-8-sig: some editors put a byte order mark before the text.
        words = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise PolicyError(
            f"There is no policy file at {os.fspath(path)!r}. Write one with `policy.save(path)`."
        ) from error
    except OSError as error:
        raise PolicyError(
            f"The policy file {os.fspath(path)!r} cannot be read: {error.strerror}."
        ) from error
    except RecursionError as error:
        raise PolicyError(
            f"{os.fspath(path)!r} is nested too deeply to be read. A policy file has tables and"
            " lists of plain values only."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"{os.fspath(path)!r} is not valid TOML: {error}. A policy file holds lines such as"
            ' level = "O1" and full = ["softmax"].'
        ) from error
    return {name: _plain(value) for name, value in words.items()}


def _value(value: Any) -> str:
    match value:
        case None:
            # TOML has no null; an empty table stands for it.
            return "{}"
        case list():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case float() if isinf(value):
            return str(value)
    return _json(value)


def _json(value: Any) -> str:
    """A string, number or boolean, which is the same text in JSON and in TOML; but TOML takes no halves of a surrogate pair, and no bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [None if item == {} else _plain(item) for item in value]
    return value
