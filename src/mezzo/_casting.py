"""Cast tensors: the one place where a tensor changes dtype."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from operator import attrgetter, methodcaller
from typing import Any

import torch

from mezzo._dtypes import CASTABLE_DTYPES

Cast = Callable[[torch.Tensor], torch.Tensor]


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor; autograd records it. Returns the tensor itself if it has this dtype."""
    # By keyword: torch's parser takes 2.1 µs this way and 3.1 by position, where it first tries to
    # read a device.
    return tensor.to(dtype=dtype)


CASTS: Mapping[torch.dtype, Cast] = {
    dtype: methodcaller("to", dtype=dtype) for dtype in CASTABLE_DTYPES
}
"""`cast` for code that runs at every op: without a Python frame, which costs another 0.3 µs."""


def device_test(device: str) -> Callable[[torch.Tensor], bool]:
    """Return the fastest predicate for whether a tensor is on a device type."""
    flag = f"is_{device}"
    return (
        attrgetter(flag)
        if hasattr(torch.Tensor, flag)
        else lambda tensor: tensor.device.type == device
    )


def is_castable(value: object, device: str) -> bool:
    """Return whether a policy may cast this: a float32, float16 or bfloat16 tensor on the device.

    `device` is a device type, such as "cuda".
    """
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in CASTABLE_DTYPES
        and value.device.type == device
    )


PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
"""Types of values that are common in inputs and hold no tensors."""
SEQUENCES = (list, tuple)
"""As a tuple of types: a union in a call of `isinstance` is made again at each call."""


def map_tensors(value: Any, change: Cast) -> Any:
    """Apply a function to every tensor of a nested container.

    Lists, tuples, named tuples, mappings and dataclasses keep their type. A container in which no
    tensor changes is returned as it is, the same object.

    >>> map_tensors({"x": [torch.ones(1)], "n": 3}, torch.neg)
    {'x': [tensor([-1.])], 'n': 3}
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, SEQUENCES):
        changed = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):
        return _map_items(value, change)
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Mapping):
        return _map_items(value, change)
    if is_dataclass_instance(value):
        return _map_fields(value, change)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested container.

    >>> len(tensors_of({"x": torch.ones(2), "rest": [torch.ones(1), 3]}))
    2
    """
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found


def is_dataclass_instance(value: object) -> bool:
    """Return whether this is an instance of a dataclass, not a dataclass itself."""
    return is_dataclass(value) and not isinstance(value, type)


def field_items(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of the fields of a dataclass that are set, in order."""
    return [
        (field.name, getattr(value, field.name))
        for field in fields(value)
        if hasattr(value, field.name)
    ]


def cast_all(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Cast every castable tensor of a nested container; see `is_castable`."""
    return map_tensors(
        value, lambda tensor: cast(tensor, dtype) if is_castable(tensor, device) else tensor
    )


def _map_items(value: Mapping[Any, Any], change: Cast) -> Any:
    changed = {key: map_tensors(item, change) for key, item in value.items()}
    if all(changed[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return changed
    if not isinstance(value, dict | UserDict):
        return type(value)(changed)  # type: ignore[call-arg]
    # A copy, since a subclass has more than items: a default factory, the attributes of a model's
    # output, the encodings of a tokenizer.
    rebuilt = copy(value)
    for key, item in changed.items():
        # Not `update`, which the outputs of transformers refuse.
        rebuilt[key] = item
    return rebuilt


def _map_fields(value: Any, change: Cast) -> Any:
    items = field_items(value)
    changed = [map_tensors(item, change) for _, item in items]
    if all(new is old for new, (_, old) in zip(changed, items, strict=True)):
        return value
    # Not `replace`, which runs `__post_init__` again; it may be frozen, too.
    rebuilt = copy(value)
    for new, (name, _) in zip(changed, items, strict=True):
        object.__setattr__(rebuilt, name, new)
    return rebuilt
