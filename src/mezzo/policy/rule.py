"""The words a policy is made of: rules, levels, and entries that carry their reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

from mezzo._errors import PolicyError, unknown


class Word(Enum):
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


class Rule(Word):
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


class Level(Word):
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
        hint = " The first character is the letter O, not a zero." if str(word).startswith("0") else ""
        return super()._unknown(word) + hint


class Master(Word):
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


class Cache(Word):
    """How a region remembers the 16-bit copies of float32 weights."""

    AUTO = "auto"
    """mezzo's own where the policy is steered, torch's where torch's lists do the work."""
    VERSIONED = "versioned"
    """mezzo's own: notices in-place changes, serves frozen weights and inference."""
    TORCH = "torch"
    """torch's own."""
    OFF = "off"
    """None: every use casts again."""


class OnUnsupported(Word):
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
