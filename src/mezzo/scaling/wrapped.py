"""Optimizers that step another optimizer: Accelerate's and Fabric's wrappers, ZeroRedundancyOptimizer, SAM, Lookahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mezzo.scaling.binding import BoundStep, binding_of

Optimizer = torch.optim.Optimizer

_OWN = frozenset({"state", "param_groups", "defaults"})
"""Attributes that every optimizer has, and that hold tensors and numbers."""


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers among the attributes of an optimizer and of those, by the path to each; lists, tuples, sets and dictionaries are looked into.

    >>> outer, inner = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    >>> outer.parts = {"first": inner}
    >>> list(inner_optimizers(outer))
    [".parts['first']"]
    """
    found: dict[str, Optimizer] = {}
    _collect(optimizer, "", found, {id(optimizer)})
    return found


def bindings_of(optimizer: Optimizer) -> list[BoundStep]:
    """What the step of an optimizer was bound to, or the steps of those that it wraps."""
    own = binding_of(optimizer)
    if own is not None:
        return [own]
    if type(optimizer).__module__.startswith("torch.optim."):
        # Asked at every step: torch's own wrap nothing.
        return []
    return [bound for inner in inner_optimizers(optimizer).values() if (bound := binding_of(inner)) is not None]


def _collect(optimizer: Optimizer, path: str, found: dict[str, Optimizer], seen: set[int]) -> None:
    for name, value in vars(optimizer).items():
        if name not in _OWN:
            for rest, inner in _optimizers_in(value, "", seen):
                # The public name of what is also an attribute without the underscore.
                public = name.lstrip("_")
                named = public if public != name and not rest and getattr(optimizer, public, None) is inner else name
                found[f"{path}.{named}{rest}"] = inner
                _collect(inner, f"{path}.{named}{rest}", found, seen)


def _optimizers_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Optimizer]]:
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        entries = list(enumerate(value))
    elif not isinstance(value, Optimizer):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        yield path, value
    for key, one in entries:
        yield from _optimizers_in(one, f"{path}[{key!r}]", seen)
