"""Values that policies are made of: rules, levels, master formats, module selectors, op lists."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from torch import nn

from mezzo._errors import PolicyError, unknown
from mezzo._torch import BatchOrInstanceNorm

Accepted = TypeVar("Accepted")
Stored = TypeVar("Stored")


class Parsed(Generic[Accepted, Stored]):
    """A dataclass field that accepts one type and stores another: it parses what is assigned.

    The value lies in the instance's `__dict__` under the field's name. A frozen dataclass assigns
    only in its generated `__init__`, so the stored value cannot change afterwards.

    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: Parsed[str | int, int] = Parsed(int, default="1")
    >>> Point().x, Point("2").x
    (1, 2)
    """

    def __init__(self, parse: Callable[[Accepted], Stored], *, default: Accepted) -> None:
        self._parse, self._default = parse, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # Only for type checkers: without `__get__`, Python reads the instance's `__dict__` directly,
    # and the dataclass takes this object itself as the field's default.
    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> Stored: ...

    def __set__(self, instance: object, value: Accepted) -> None:
        is_default: bool = value is self
        instance.__dict__[self._name] = self._parse(self._default if is_default else value)

    def __repr__(self) -> str:
        """Show the default, which is what a signature prints."""
        return repr(self._default)


class ParsedEnum(Enum):
    """A closed set whose members are parsed from their values."""

    # Members are singletons. Enum's `__hash__` is a Python function: with it the hash of a policy,
    # which every entry of a region with that policy needs, takes 1.6 µs instead of 1.3.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the member with this value; raise `PolicyError` with the allowed ones otherwise.

        >>> Rule.parse("half")
        Rule.HALF
        """
        if isinstance(value, cls):
            return value
        for member in cls:
            if member.value == value:
                return member
        raise PolicyError(cls._unknown(value))

    @classmethod
    def _unknown(cls, value: object) -> str:
        return unknown(cls._argument_name(), value, (str(member.value) for member in cls))

    @classmethod
    def _argument_name(cls) -> str:
        """Return the name of the argument that takes a member, for error messages."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Rule(ParsedEnum):
    """What happens to the floating-point inputs of an op.

    The first five cover the op lists of every supported system.
    """

    HALF = "half"
    """Cast to the policy's 16-bit dtype."""
    FULL = "full"
    """Cast to float32."""
    PROMOTE = "promote"
    """Cast to the widest dtype among the inputs."""
    KEEP = "keep"
    """Leave the inputs as they are."""
    REFUSE = "refuse"
    """Raise `RefusedOpError`, which names the op to call instead."""
    FLOAT32_INSIDE = "float32_inside"
    """Run the kernel for the dtype of the first input, which computes in float32 inside."""


class Level(ParsedEnum):
    """Which parameters and ops become 16-bit."""

    O0 = "O0"
    """Everything float32."""
    O1 = "O1"
    """float32 parameters; op lists choose the precision of each op."""
    O2 = "O2"
    """16-bit parameters with master weights; torch's op lists are those of O1."""
    O3 = "O3"
    """16-bit parameters without master weights; every op 16-bit."""
    OD = "OD"
    """float32 parameters; ops listed half are 16-bit, all others float32."""

    @classmethod
    def _unknown(cls, value: object) -> str:
        hint = " The first character is the letter O, not a zero."
        return super()._unknown(value) + (hint if str(value).startswith("0") else "")


class Master(ParsedEnum):
    """Format of the master weights of 16-bit parameters."""

    AUTO = "auto"
    """The default of the level: float32 master weights at O2, none at O3."""
    FLOAT32 = "float32"
    """A float32 copy of every 16-bit parameter."""
    SPLIT = "split"
    """A bfloat16 parameter and a 16-bit remainder, which together are an exact float32."""
    KAHAN = "kahan"
    """A 16-bit parameter and a 16-bit compensation of the rounding error."""
    STOCHASTIC = "stochastic"
    """No master weights: updates are rounded stochastically, without bias."""
    NONE = "none"
    """No master weights: updates smaller than the rounding error are lost."""


class Cache(ParsedEnum):
    """Weight cache of a region: how 16-bit copies of float32 weights are reused."""

    AUTO = "auto"
    """mezzo's where the policy overrides torch's op lists, torch's where it does not."""
    VERSIONED = "versioned"
    """mezzo's: detects in-place changes, and also caches frozen weights and in inference."""
    TORCH = "torch"
    """torch's autocast cache."""
    OFF = "off"
    """No cache: every use casts again."""


class OnUnsupported(ParsedEnum):
    """What to do on a device that does not support the dtype of the policy."""

    ERROR = "error"
    """Raise `UnsupportedError`."""
    WARN = "warn"
    """Warn once, then run in float32."""
    IGNORE = "ignore"
    """Run in float32 without a warning."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Rule of one op in an op list, with its reason."""

    rule: Rule
    reason: str


BY_USER = "listed for these values by the user"
"""Default reason of a conditional entry."""


@dataclass(frozen=True, slots=True)
class Conditional:
    """An op that runs in float32 if an argument has one of these values."""

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
"""Normalization layers, with batch and instance norm of every dimension: the default of
`keep_full`."""


@dataclass(frozen=True, order=True)
class Selector:
    """Selects modules by a glob on the qualified name, or by a class and its subclasses.

    In a glob (`encoder.*.norm`) a star also matches dots, and the name of the model itself is `""`.
    A class is stored by name (`type:torch.nn.modules.normalization.LayerNorm`), so that loading a
    policy file imports nothing.
    """

    text: str

    @classmethod
    def parse(cls, value: str | type | Self) -> Self:
        """Make a selector of a glob, a module class or a `type:` name.

        >>> Selector.parse(nn.LayerNorm)
        Selector(text='type:torch.nn.modules.normalization.LayerNorm')
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, type) and issubclass(value, nn.Module):
            return cls(_TYPE + _path(value))
        if isinstance(value, str) and value != _TYPE:
            return cls(value)
        raise PolicyError(
            f"{value!r} does not select modules. Pass a glob on the qualified name"
            " ('encoder.*.norm') or a module class (nn.LayerNorm)."
        )

    @property
    def rank(self) -> int:
        """Precedence: an exact name beats a glob, a glob beats a class."""
        if self.text.startswith(_TYPE):
            return 0
        return 1 if any(wildcard in self.text for wildcard in "*?[") else 2

    def matches(self, name: str, module: nn.Module) -> bool:
        """Return whether the module with this qualified name is selected."""
        if not self.text.startswith(_TYPE):
            return fnmatchcase(name, self.text)
        path = self.text.removeprefix(_TYPE)
        public = _class_at(path)
        return any(
            base is public or path in (_path(base), base.__qualname__)
            for base in type(module).__mro__
        )


def _class_at(path: str) -> object:
    """Return the class at a public path (torch.nn.LayerNorm), which may be defined elsewhere.

    Imports nothing: None if the module is not imported yet.
    """
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _path(module_class: type) -> str:
    return f"{module_class.__module__}.{module_class.__qualname__}"


@dataclass(frozen=True)
class OpLists:
    """Complete op lists: the rule and the reason for every op."""

    entries: Mapping[str, Entry]
    """Rule and reason by name of the op, for every listed op."""
    default_rule: Entry
    """Rule and reason for ops that are not listed."""
    exempt_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments that neither decide the dtype nor are cast to 16 bits, by name of the op: the
    parameters and statistics of a norm."""
    conditional: tuple[Conditional, ...] = ()
    """Ops that run in float32 for some values of an argument."""
    refused_in_half: frozenset[str] = frozenset()
    """Refused ops that may be called with float32 inputs."""


@dataclass(frozen=True)
class OpNames:
    """Translation of another system's op names."""

    known: Mapping[str, tuple[str, ...]]
    """Their name → the names of the ops here that do the same."""
    unknown: Mapping[str, str]
    """Their name → why there is no counterpart here."""
