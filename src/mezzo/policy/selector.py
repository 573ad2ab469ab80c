"""Which modules are meant: by a glob on the qualified name, or by type."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from torch import nn

from mezzo._errors import PolicyError
from mezzo._torch import BatchOrInstanceNorm

_TYPE = "type:"

NORMS: tuple[type[nn.Module], ...] = (
    BatchOrInstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
"""The normalisation layers, batch and instance norm of every dimension included: what `keep_full` keeps in float32 by default."""


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
        raise PolicyError(f"A module is named by a glob on its qualified name ('encoder.*.norm') or by its class (nn.LayerNorm), got {word!r}.")

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
        return any(base is public or wanted in (_path(base), base.__qualname__) for base in type(module).__mro__)


def _imported(path: str) -> object:
    """The class that people import from a path (torch.nn.LayerNorm), though it is defined elsewhere; looked for in what is imported already."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
