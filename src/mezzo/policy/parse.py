"""Parse the arguments and TOML files of policies, and format them again."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Mapping
from itertools import combinations
from math import isinf, isnan
from pathlib import Path
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, parse_dtype
from mezzo._errors import PolicyError, choices, nearest
from mezzo._files import write_text
from mezzo.policy.registry import parameters, registry
from mezzo.policy.types import BY_USER, Conditional, Master, Rule, Selector

DtypeArg = str | torch.dtype | None
"""`"bfloat16"`, `torch.bfloat16` or None."""
OpNamesArg = Collection[str] | str
"""`{"add", "torch.nn.functional.softmax"}`; a single string raises with a hint."""
ExemptArgs = Mapping[str, OpNamesArg] | tuple[Any, ...]
"""`{"batch_norm": {"weight", "bias"}}`, or the tuple of pairs that a policy stores."""
ConditionalArg = Conditional | tuple[Any, ...] | list[Any]
"""A conditional entry: `("softmax", "dim", [-1])`."""
ModuleRules = Mapping[str | type, str | Rule] | tuple[Any, ...]
"""`{"head": "full", nn.LSTM: "half"}`, or the tuple of pairs that a policy stores."""
Selectors = Collection[str | type | Selector] | str | type
"""One or several globs and module classes: `{"head", nn.LayerNorm}`."""

MODULE_RULES = (Rule.HALF, Rule.FULL, Rule.KEEP)
"""The rules that apply to whole modules."""


def half_dtype(value: DtypeArg) -> torch.dtype | None:
    """Parse `dtype`; None stands for `"auto"`."""
    return None if value in ("auto", None) else parse_dtype(value, further=("auto",))


def grad_dtype(value: DtypeArg) -> torch.dtype | None:
    """Parse `grad_dtype`, which may also be float32."""
    allowed = (*HALF_DTYPES, torch.float32)
    return None if value is None else parse_dtype(value, allowed=allowed, what="grad_dtype")


def default_rule(value: str | Rule | None) -> Rule | None:
    """Parse `default_rule`."""
    rule = None if value is None else Rule.parse(value)
    if rule is Rule.FLOAT32_INSIDE:
        raise PolicyError(
            "default_rule='float32_inside' is not possible: few kernels compute in float32 inside."
            f" List such ops: float32_inside={{...}}. {choices(FLOAT32_INSIDE_OPS)}"
        )
    return rule


FLOAT32_INSIDE_OPS = (
    "layer_norm",
    "group_norm",
    "rms_norm",
    "softmax",
    "log_softmax",
    "sum",
    "mean",
)
"""Ops whose 16-bit kernels sum in float32 on every device, and round once at the end."""


def check_float32_inside(names: frozenset[str]) -> None:
    """Raise `PolicyError` for ops whose 16-bit kernels do not compute in float32 inside."""
    for name in sorted(names.difference(FLOAT32_INSIDE_OPS)):
        raise PolicyError(
            f"float32_inside={{{name!r}}}: the 16-bit kernel of {name} does not compute in float32"
            f" inside. {choices(FLOAT32_INSIDE_OPS)}"
        )


def master(value: str | Master | None) -> Master:
    """Parse `master`; None is the same as `"none"`."""
    return Master.NONE if value is None else Master.parse(value)


def op_names(field: str, names: OpNamesArg) -> frozenset[str]:
    """Return canonical op names; accepts every spelling in the registry.

    >>> sorted(op_names("half", {"true_divide", "add"}))
    ['add', 'div']
    """
    if isinstance(names, str):
        raise PolicyError(
            f"{field}={names!r} should be a set of op names. Pass {field}={{{names!r}}}."
        )
    if isinstance(names, Mapping) or not isinstance(names, Collection):
        raise PolicyError(f"{field}={names!r} should be a set of op names such as {{'softmax'}}.")
    return frozenset(registry().parse(name) for name in names)


def refuse_overlaps(lists: Mapping[str, frozenset[str]]) -> None:
    """Raise `PolicyError` if an op is listed under two rules."""
    for (one, ones), (other, others) in combinations(lists.items(), 2):
        if both := sorted(ones & others):
            raise PolicyError(
                f"{one}= and {other}= both list {', '.join(repr(name) for name in both)}. An op has"
                " one rule: remove it from one of the lists."
            )


def exemptions(table: ExemptArgs) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parse `exempt_args`: the arguments, by op, that are not cast to 16 bits."""
    parsed: dict[str, set[str]] = {}
    for key, names in _pairs(
        "exempt_args", table, "an op to its arguments, such as {'batch_norm': {'weight', 'bias'}}"
    ):
        op = registry().parse(key)
        parsed.setdefault(op, set()).update(check_argument(op, name) for name in _as_tuple(names))
    return tuple(sorted((op, tuple(sorted(names))) for op, names in parsed.items()))


def conditionals(entries: Collection[ConditionalArg]) -> tuple[Conditional, ...]:
    """Parse conditional entries: an op, an argument, and the values that need float32."""
    if isinstance(entries, str | Mapping) or not isinstance(entries, Collection):
        raise PolicyError(
            f"conditional={entries!r} should be a list of (op, argument, values), such as"
            " [('softmax', 'dim', [-1])]."
        )
    return tuple(sorted({_conditional(entry) for entry in entries}, key=repr))


def module_rules(table: ModuleRules) -> tuple[tuple[Selector, Rule], ...]:
    """Parse module rules; their order is kept, since a later glob overrides an earlier one."""
    parsed: dict[Selector, Rule] = {}
    for key, value in _pairs(
        "modules", table, "a glob or a class to a rule, such as {'head': 'half'}"
    ):
        selector, rule = Selector.parse(key), _module_rule(key, value)
        if parsed.pop(selector, rule) is not rule:
            raise PolicyError(
                f"modules= has two rules for {selector.text!r}. A module has one rule: remove one"
                " of them."
            )
        parsed[selector] = rule
    return tuple(parsed.items())


def selectors(entries: Selectors) -> tuple[Selector, ...]:
    """Parse `keep_full`: one or several globs and module classes."""
    collected = (entries,) if isinstance(entries, str | type | Selector) else entries
    if isinstance(collected, Mapping) or not isinstance(collected, Collection):
        raise PolicyError(
            f"keep_full={entries!r} should be a set of globs and classes such as"
            " {'encoder.*.norm', nn.LayerNorm}."
        )
    return tuple(sorted({Selector.parse(entry) for entry in collected}))


def format_value(field: str, value: Any) -> str:
    """Format a field as Python source: op names as a set, conditional entries as tuples.

    >>> format_value("half", ["add", "mul"])
    "{'add', 'mul'}"
    """
    if field in _OP_LISTS and value:
        return "{" + ", ".join(repr(name) for name in value) + "}"
    if field == "conditional":
        return f"[{', '.join(_format_conditional(*entry) for entry in value)}]"
    return repr(value)


_OP_LISTS = frozenset(rule.value for rule in Rule)


def check_argument(op: str, name: str) -> str:
    """Return the name if the op has such an argument; raise `PolicyError` otherwise."""
    known = {
        parameter for function in registry()[op].functions for parameter in parameters(function)
    }
    if isinstance(name, str) and (not known or name in known):
        return name
    raise PolicyError(
        f"{op} has no argument {name!r}.{nearest(str(name), known)} {choices(sorted(known))}"
    )


def _format_conditional(op: str, argument: str, values: list[Any], *reason: str) -> str:
    # repr(inf) is `inf`, which is not a Python expression.
    formatted = ", ".join(
        f"float({str(value)!r})" if isinstance(value, float) and isinf(value) else repr(value)
        for value in values
    )
    return f"({', '.join([repr(op), repr(argument), f'[{formatted}]', *map(repr, reason)])})"


def _pairs(field: str, table: Any, meaning: str) -> list[tuple[Any, Any]]:
    """Return the items of a mapping, or of the tuple of pairs in which a policy stores it."""
    pairs = list(table.items()) if isinstance(table, Mapping) else table
    if not isinstance(pairs, tuple | list) or any(
        not isinstance(pair, tuple | list) or len(pair) != len(("key", "value")) for pair in pairs
    ):
        raise PolicyError(f"{field}={table!r} should be a table from {meaning}.")
    return [(key, value) for key, value in pairs]


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, list | tuple | set | frozenset) else (values,)


def _conditional(entry: ConditionalArg) -> Conditional:
    if isinstance(entry, Conditional):
        op, argument, values, reason = entry.op, entry.argument, entry.values, entry.reason
    elif isinstance(entry, tuple | list) and len(entry) in (3, 4):
        op, argument, values, reason = (*entry, BY_USER)[:4]
    else:
        raise PolicyError(
            f"{entry!r} is not a conditional entry. Pass (op, argument, values), such as"
            " ('softmax', 'dim', [-1])."
        )
    name = registry().parse(op)
    for value in _as_tuple(values):
        _check_conditional_value(name, value)
    if not isinstance(reason, str):
        raise PolicyError(
            f"The reason of a conditional entry for {name!r} is a string, got {reason!r}."
        )
    sorted_values = tuple(sorted(set(_as_tuple(values)), key=repr))
    return Conditional(name, check_argument(name, argument), sorted_values, reason)


def _check_conditional_value(op: str, value: object) -> None:
    is_plain = value is None or isinstance(value, str | int | float | bool)
    # nan equals nothing, so that no call could match it.
    if not is_plain or (isinstance(value, float) and isnan(value)):
        raise PolicyError(
            f"The values of a conditional entry for {op!r} are strings, numbers, booleans or None,"
            f" got {value!r}."
        )


def _module_rule(key: Any, rule: str | Rule) -> Rule:
    if isinstance(rule, Mapping):
        raise PolicyError(
            f"The rule of module {key!r} is a table: {rule!r}. Quote names with dots in TOML:"
            ' "encoder.norm" = "full".'
        )
    parsed = Rule.parse(rule)
    if parsed in MODULE_RULES:
        return parsed
    raise PolicyError(
        f"{parsed.value!r} is not a rule for whole modules ({key!r})."
        f" {choices(rule.value for rule in MODULE_RULES)}"
    )


_HEADER = "# A mezzo policy: mezzo.Policy.load reads it.\n"


def save_toml(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write the fields of a policy to a TOML file, atomically."""
    write_text(path, _HEADER + format_toml(fields))


def format_toml(fields: Mapping[str, Any]) -> str:
    """Format the fields of a policy as TOML.

    >>> print(format_toml({"level": "O2", "full": ["softmax"]}), end="")
    level = "O2"
    full = ["softmax"]
    """
    tables = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_to_toml(value)}" for name, value in fields.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{_to_json(key)} = {_to_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of a policy from a TOML file."""
    try:
        # utf-8-sig: some editors write a byte order mark.
        fields = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
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
    return {name: _from_toml(value) for name, value in fields.items()}


def _to_toml(value: Any) -> str:
    match value:
        case None:
            # TOML has no null; an empty table represents it.
            return "{}"
        case list():
            return "[" + ", ".join(_to_toml(item) for item in value) + "]"
        case float() if isinf(value):
            return str(value)
    return _to_json(value)


def _to_json(value: Any) -> str:
    """Format a string, number or boolean, which JSON and TOML write alike.

    Except that TOML accepts neither JSON's escaped surrogate pairs nor a bare DEL.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _from_toml(value: Any) -> Any:
    if isinstance(value, list):
        return [None if item == {} else _from_toml(item) for item in value]
    return value
