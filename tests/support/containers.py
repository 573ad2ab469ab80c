"""Containers of inputs, as programs and libraries have them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as the tokenizers of transformers return it."""

    def __init__(self, data: Mapping[str, Any], note: str = "") -> None:
        super().__init__(data)
        self.note = note


class Frozen(Mapping[str, Any]):
    """A mapping without methods that change it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


@dataclass
class Fields:
    one: Any
    two: Any


@dataclass(frozen=True)
class FrozenFields:
    one: Any
    two: Any


class Named(NamedTuple):
    one: Any
    two: Any


Untyped = namedtuple("Untyped", ["one", "two"])  # noqa: PYI024 - without types, as many have it

CONTAINERS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "ordered dict": OrderedDict,
    "user dict": lambda **items: Encoding(items),
    "mapping": lambda **items: Frozen(items),
    "mapping proxy": lambda **items: MappingProxyType(items),
    "dataclass": Fields,
    "frozen dataclass": FrozenFields,
    "named tuple": Named,
    "untyped named tuple": Untyped,
    "tuple": lambda one, two: (one, two),
}
"""Functions that make a container of `one=` and `two=`, by name."""


def values_of(container: Any) -> list[Any]:
    """Return the two values in a container."""
    if isinstance(container, Mapping):
        return [container["one"], container["two"]]
    return list(container) if isinstance(container, tuple) else [container.one, container.two]


def sizes(tensors: list[torch.Tensor]) -> list[int]:
    """Return the number of elements of each tensor, which tells tensors apart."""
    return [tensor.numel() for tensor in tensors]
