"""What a preset is: another system's op lists in mezzo's op names, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mezzo.policy.rule import Conditional, Entry


@dataclass(frozen=True)
class OpLists:
    """A complete answer to 'which op runs in which precision, and why'."""

    entries: Mapping[str, Entry]
    """Op name → rule and reason, for every op that is listed."""
    unlisted: Entry
    """The rule for ops in no list."""
    exempt: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Op name → names of the arguments that do not decide and are never cast down: a norm's parameters and statistics."""
    conditional: tuple[Conditional, ...] = ()
    """Ops that are float32 only for some values of an argument."""
    refused_halves: frozenset[str] = frozenset()
    """Of the refused ops those that are refused with 16-bit inputs alone: who casts to float32 may call them."""


@dataclass(frozen=True)
class OpNames:
    """How another system's op names translate."""

    known: Mapping[str, tuple[str, ...]]
    """Their name → the names of the ops here that do the same."""
    unknown: Mapping[str, str]
    """Their name → why there is no counterpart here."""
