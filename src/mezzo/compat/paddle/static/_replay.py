"""Running what a program noted, on tensors that have values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo.compat.paddle.static._program import UNKNOWN_SIZES, Node, Variable

Around = Callable[[Node, tuple[Any, Any]], Any]
"""Carries one call out, given what it is called with."""


def plainly(node: Node, given: tuple[Any, Any]) -> Any:
    """A call as it is."""
    args, kwargs = given
    return node.function(*args, **kwargs)


def evaluating(node: Node, given: tuple[Any, Any]) -> Any:
    """A call as in evaluation: dropout keeps everything, a batch norm uses its statistics."""
    args, kwargs = given
    place = _place_of_training(node.function)
    if place is None:
        return node.function(*args, **kwargs)
    if place < len(args):
        args = (*args[:place], False, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "training": False}
    return node.function(*args, **kwargs)


def replay(nodes: Sequence[Node], feeds: Mapping[Variable, torch.Tensor], wanted: Iterable[Variable], around: Around = plainly) -> list[torch.Tensor]:
    """The values of variables."""
    values = {id(variable): value for variable, value in feeds.items()}
    sizes = {size: found for variable, value in feeds.items() for size, found in zip(variable.sizes, value.shape, strict=True) if size in UNKNOWN_SIZES}

    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Variable):
            return tensor
        if id(tensor) not in values:
            raise ValueError(f"The program needs {tensor.name!r}, which was not fed. Pass feed={{{tensor.name!r}: ...}}.")
        return values[id(tensor)]

    for node in nodes:
        said = (node.args, dict(node.kwargs))
        result = around(node, map_tensors(_with_sizes(said, sizes) if sizes else said, value_of))
        outputs = iter(node.outputs)

        def keep(tensor: torch.Tensor, outputs: Any = outputs) -> torch.Tensor:
            values[id(next(outputs))] = tensor
            return tensor

        map_tensors(result, keep)
    return [value_of(variable) for variable in wanted]


def _with_sizes(value: Any, sizes: Mapping[int, int]) -> Any:
    """Arguments with the sizes of the feed in the place of what stands for them, and of multiples of it."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_with_sizes(item, sizes) for item in value])
    if isinstance(value, dict):
        return {name: _with_sizes(item, sizes) for name, item in value.items()}
    if type(value) is int and value > 0:
        for size in [size for size in sizes if value % size == 0]:
            value = value // size * sizes[size]
    return value


@cache
def _place_of_training(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # A function of torch's that is written in C has no such argument.
        return None
    return names.index("training") if "training" in names else None
