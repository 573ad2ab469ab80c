"""How a preset's tables are read: short strings of names in, entries with their reason out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mezzo._errors import PolicyError, choices
from mezzo.policy.op_names import is_removed
from mezzo.policy.types import Entry, Level, OpNames, Rule


def name_map(known: Mapping[str, str], unknown: Mapping[str, str], *, same: str = "") -> OpNames:
    """Read a name map from strings of names.

    ``known`` has their name → our names, ``unknown`` the reason → their names, and ``same`` the
    names that mean the same op here and there.

    >>> name_map({"concat": "cat"}, {"a quantization step": "quantize"}, same="relu").known["concat"]
    ('cat',)
    """
    translated = {
        theirs: tuple(name for name in ours.split() if not is_removed(name))
        for theirs, ours in known.items()
    }
    unchanged = {name: (name,) for name in same.split()}
    missing = {theirs: reason for reason, names in unknown.items() for theirs in names.split()}
    return OpNames(known=unchanged | translated, unknown=missing)


def translate(rule: Rule, groups: Mapping[str, str], names: OpNames) -> dict[str, Entry]:
    """Turn one of their lists (reason → their names) into entries for our ops; what has no counterpart falls out.

    >>> names = name_map({"concat": "cat"}, {})
    >>> translate(Rule.PROMOTE, {"copies its inputs side by side": "concat"}, names)["cat"].rule
    Rule.PROMOTE
    """
    return {
        ours: Entry(rule, reason)
        for reason, group in groups.items()
        for theirs in group.split()
        for ours in names.known.get(theirs, ())
    }


def merge_disjoint(*tables: Mapping[str, Entry]) -> dict[str, Entry]:
    """Join tables that must not name the same op: a preset that says two things of one op is a mistake in its data."""
    result: dict[str, Entry] = {}
    for table in tables:
        twice = result.keys() & table.keys()
        if twice:
            raise PolicyError(
                f"These ops are in two lists of one preset: {', '.join(sorted(twice))}. Leave each"
                " in one."
            )
        result.update(table)
    return result


_ONE_DTYPE = (
    "bilinear conv_transpose1d cross dot embedding_bag grid_sample index_add index_copy index_put"
    " lerp masked_scatter prelu scaled_dot_product_attention scatter scatter_add vdot"
)
"""Ops whose kernels in torch take one dtype only."""

WIDEST = Entry(
    Rule.PROMOTE,
    "no rule says otherwise, and torch's kernel takes one dtype only: the widest input decides",
)


def with_promotions(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of a system that leaves other ops as they are, and the ops that torch would then refuse where dtypes meet.

    Attention with float32 rotary positions is such a place: the values are 16-bit, queries and keys
    are not.

    >>> with_promotions({})["scaled_dot_product_attention"].rule
    Rule.PROMOTE
    """
    widest = dict.fromkeys(_ONE_DTYPE.split(), WIDEST)
    return widest | {
        name: entry
        for name, entry in entries.items()
        if entry.rule is not Rule.KEEP or name not in widest
    }


def require_level(system: str, level: Level, known: Iterable[Level]) -> None:
    """Refuse a level that the system does not have."""
    known = tuple(known)
    if level not in known:
        raise PolicyError(
            f"The preset {system!r} has no level {level.value}."
            f" {choices(one.value for one in known)}"
        )
