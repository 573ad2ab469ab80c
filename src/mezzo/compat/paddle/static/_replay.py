"""Running what a program noted, on tensors that have values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo.compat.paddle.static._program import Node, Variable

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

    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        return values[id(tensor)] if isinstance(tensor, Variable) else tensor

    for node in nodes:
        result = around(node, map_tensors((node.args, dict(node.kwargs)), value_of))
        outputs = iter(node.outputs)

        def keep(tensor: torch.Tensor, outputs: Any = outputs) -> torch.Tensor:
            values[id(next(outputs))] = tensor
            return tensor

        map_tensors(result, keep)
    return [values[id(variable)] for variable in wanted]


@cache
def _place_of_training(function: Any) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        # A function of torch's that is written in C has no such argument.
        return None
    return names.index("training") if "training" in names else None
