"""Values that policies are made of: rules, levels, master formats, module selectors, op lists."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Self

from torch import nn

from mezzo._errors import PolicyError, unknown
from mezzo._torch import BatchOrInstanceNorm


class ParsedEnum(Enum):
    """A closed set whose members are read from their spelling."""

    @classmethod
    def parse(cls, word: str | Self) -> Self:
        """Read a member from its spelling, or say what is allowed."""
        if isinstance(word, cls):
            return word
        for member in cls:
            if member.value == word:
                return member
        raise PolicyError(cls._unknown(word))

    @classmethod
    def _unknown(cls, word: object) -> str:
        return unknown(cls._said(), word, (str(member.value) for member in cls))

    @classmethod
    def _said(cls) -> str:
        """What the set is called in a message: the name of the field."""
        return cls.__name__.lower()

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Rule(ParsedEnum):
    """What happens to the floating-point inputs of an op. Few rules cover every system; they differ only in tables."""

    HALF = "half"
    """Cast to the policy's 16-bit dtype."""
    FULL = "full"
    """Cast to float32."""
    PROMOTE = "promote"
    """Cast to the widest dtype among the inputs."""
    KEEP = "keep"
    """Leave the inputs alone."""
    REFUSE = "refuse"
    """Raise, and say what to call instead."""


class Level(ParsedEnum):
    """How far a policy goes."""

    O0 = "O0"
    """Everything float32."""
    O1 = "O1"
    """float32 parameters; op lists decide."""
    O2 = "O2"
    """16-bit parameters with masters; everything 16-bit but a short list."""
    O3 = "O3"
    """16-bit parameters without masters; everything 16-bit."""
    OD = "OD"
    """float32 parameters; only what is listed half is 16-bit, everything else float32."""

    @classmethod
    def _unknown(cls, word: object) -> str:
        hint = (
            " The first character is the letter O, not a zero." if str(word).startswith("0") else ""
        )
        return super()._unknown(word) + hint


class Master(ParsedEnum):
    """Where the exact weights live while the parameters are 16-bit."""

    AUTO = "auto"
    """What the level says: float32 masters at O2, none at O3."""
    FLOAT32 = "float32"
    """A float32 copy of every 16-bit parameter."""
    SPLIT = "split"
    """A bfloat16 parameter and a 16-bit remainder, together an exact float32."""
    KAHAN = "kahan"
    """A 16-bit parameter and a 16-bit compensation of what rounding lost."""
    STOCHASTIC = "stochastic"
    """No master: updates are rounded at random, right on average."""
    NONE = "none"
    """No master: small updates are lost."""


class Cache(ParsedEnum):
    """How a region remembers the 16-bit copies of float32 weights."""

    AUTO = "auto"
    """mezzo's own where the policy is steered, torch's where torch's lists do the work."""
    VERSIONED = "versioned"
    """mezzo's own: notices in-place changes, serves frozen weights and inference."""
    TORCH = "torch"
    """torch's own."""
    OFF = "off"
    """None: every use casts again."""


class OnUnsupported(ParsedEnum):
    """What to do when the device lacks what the policy asks for."""

    ERROR = "error"
    """Raise."""
    WARN = "warn"
    """Warn once, then run in float32."""
    IGNORE = "ignore"
    """Run in float32."""

    @classmethod
    def _said(cls) -> str:
        return "on_unsupported"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an op list: the rule, and why."""

    rule: Rule
    reason: str


BY_USER = "listed for these values by the user"


@dataclass(frozen=True, slots=True)
class Conditional:
    """An op that runs in float32 only when an argument has one of these values."""

    op: str
    argument: str
    values: tuple[str | int | float | bool | None, ...]
    reason: str = BY_USER


_TYPE = "type:"

NORMS: tuple[type[nn.Module], ...] = (
    BatchOrInstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
"""The normalisation layers, batch and instance norm of every dimension included: what
`keep_full` keeps in float32 by default."""


@dataclass(frozen=True, order=True)
class Selector:
    """A glob on a module's qualified name (`encoder.*.norm`; a star also crosses dots, and the model itself is `""`) or a type with its subclasses (`type:torch.nn….LayerNorm`).

    A type is kept by name, so that reading a policy file imports nothing.
    """

    text: str

    @classmethod
    def parse(cls, word: str | type | Self) -> Self:
        """Read a selector from a glob, a module class or a `type:` name.

        >>> Selector.parse(nn.LayerNorm)
        Selector(text='type:torch.nn.modules.normalization.LayerNorm')
        """
        if isinstance(word, cls):
            return word
        if isinstance(word, type) and issubclass(word, nn.Module):
            return cls(_TYPE + _path(word))
        if isinstance(word, str) and word != _TYPE:
            return cls(word)
        raise PolicyError(
            "A module is named by a glob on its qualified name ('encoder.*.norm') or by its class"
            f" (nn.LayerNorm), got {word!r}."
        )

    @property
    def rank(self) -> int:
        """How specific: an exact name beats a glob, a glob beats a type."""
        if self.text.startswith(_TYPE):
            return 0
        return 1 if any(sign in self.text for sign in "*?[") else 2

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether a module under its qualified name is meant."""
        if not self.text.startswith(_TYPE):
            return fnmatchcase(name, self.text)
        wanted = self.text.removeprefix(_TYPE)
        public = _imported(wanted)
        return any(
            base is public or wanted in (_path(base), base.__qualname__)
            for base in type(module).__mro__
        )


def _imported(path: str) -> object:
    """The class that people import from a path (torch.nn.LayerNorm), though it is defined elsewhere; looked for in what is imported already."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class OpLists:
    """A complete answer to 'which op runs in which precision, and why'."""

    entries: Mapping[str, Entry]
    """Op name → rule and reason, for every op that is listed."""
    default_rule: Entry
    """The rule for ops in no list."""
    exempt_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Op name → names of the arguments that do not decide and are never cast down: a norm's
    parameters and statistics."""
    conditional: tuple[Conditional, ...] = ()
    """Ops that are float32 only for some values of an argument."""
    refused_in_half: frozenset[str] = frozenset()
    """Of the refused ops those that are refused with 16-bit inputs alone: who casts to float32
    may call them."""


@dataclass(frozen=True)
class OpNames:
    """How another system's op names translate."""

    known: Mapping[str, tuple[str, ...]]
    """Their name → the names of the ops here that do the same."""
    unknown: Mapping[str, str]
    """Their name → why there is no counterpart here."""
