"""Helpers to write presets: strings of op names in, entries with rule and reason out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mezzo._errors import PolicyError, choices
from mezzo.policy.op_names import is_removed
from mezzo.policy.types import Entry, Level, OpNames, Rule


def name_map(known: Mapping[str, str], unknown: Mapping[str, str], *, same: str = "") -> OpNames:
    """Build the translation of another system's op names from strings of names.

    `known` maps their name → our names, `unknown` the reason → their names without a counterpart,
    and `same` lists the names that mean the same op in both systems.

    >>> names = name_map({"concat": "cat"}, {"a quantization step": "quantize"}, same="relu")
    >>> names.known["concat"], names.known["relu"], names.unknown["quantize"]
    (('cat',), ('relu',), 'a quantization step')
    """
    translated = {
        foreign: tuple(name for name in ours.split() if not is_removed(name))
        for foreign, ours in known.items()
    }
    unchanged = {name: (name,) for name in same.split()}
    missing = {foreign: reason for reason, names in unknown.items() for foreign in names.split()}
    return OpNames(known=unchanged | translated, unknown=missing)


def translate(rule: Rule, groups: Mapping[str, str], names: OpNames) -> dict[str, Entry]:
    """Translate one list (reason → their names) to entries of our ops.

    Names without a counterpart are left out.

    >>> names = name_map({"concat": "cat"}, {})
    >>> translate(Rule.PROMOTE, {"copies its inputs side by side": "concat"}, names)["cat"].rule
    Rule.PROMOTE
    """
    return {
        ours: Entry(rule, reason)
        for reason, group in groups.items()
        for foreign in group.split()
        for ours in names.known.get(foreign, ())
    }


def merge_disjoint(*tables: Mapping[str, Entry]) -> dict[str, Entry]:
    """Merge lists of one preset; raise `PolicyError` if two of them contain the same op."""
    merged: dict[str, Entry] = {}
    for table in tables:
        if duplicates := merged.keys() & table.keys():
            raise PolicyError(
                f"These ops are in two lists of one preset: {', '.join(sorted(duplicates))}. Keep"
                " each in one list."
            )
        merged.update(table)
    return merged


_ONE_DTYPE = (
    "bilinear conv_transpose1d cross dot embedding_bag grid_sample index_add index_copy index_put"
    " lerp masked_scatter prelu scaled_dot_product_attention scatter scatter_add vdot"
)
"""Ops whose kernels in torch need all inputs in one dtype."""

WIDEST = Entry(
    Rule.PROMOTE,
    "in no list, and torch's kernel needs all inputs in one dtype: the widest input decides",
)


def with_promotions(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Promote the inputs of unlisted ops that torch rejects with mixed dtypes.

    For systems that do not cast the inputs of unlisted ops. An example is attention with float32
    rotary embeddings: values are 16-bit, queries and keys float32.

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
    """Raise `PolicyError` if the system does not have the level."""
    known = tuple(known)
    if level not in known:
        raise PolicyError(
            f"The preset {system!r} has no level {level.value}."
            f" {choices(level.value for level in known)}"
        )
