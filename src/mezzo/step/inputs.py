"""Inputs of a step: their signature, static buffers, and values that a body closes over."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any

import torch

from mezzo._casting import map_tensors

IMAGES = 4
"""Dimensions of a batch of images, which may have their channels last."""


# It is no error: it says that inputs cannot be told apart.
class UnsupportedInput(Exception):  # noqa: N818
    """Something among the inputs is neither a tensor nor a plain value."""


def signature(value: Any, leaves: list[torch.Tensor]) -> Hashable:
    """What a captured step depends on: the nesting, shapes, dtypes, devices and layouts, and every value that is no tensor. Tensors are added to `leaves` in order.

    >>> leaves = []
    >>> signature((torch.ones(2, 3), 7), leaves) == signature([torch.zeros(2, 3), 7], []), len(leaves)
    (False, 1)
    """
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return (
            value.shape,
            value.dtype,
            value.is_cuda,
            value.dim() == IMAGES and is_channels_last(value),
        )
    if isinstance(value, list | tuple):
        return type(value), tuple([signature(item, leaves) for item in value])
    if isinstance(value, dict):
        return type(value), tuple([(key, signature(item, leaves)) for key, item in value.items()])
    try:
        hash(value)
    except TypeError:
        raise UnsupportedInput(type(value).__name__) from None
    # 1, 1.0 and True are equal and yet not the same.
    return type(value), value


def format_shapes(leaves: Sequence[torch.Tensor]) -> str:
    """The shapes of inputs, for a message."""
    return (
        ", ".join(
            f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves
        )
        or "no tensors"
    )


def move_inputs(value: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Inputs on the device of the model; images get their channels last if the model has."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if channels_last and tensor.dim() == IMAGES and tensor.is_floating_point():
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return map_tensors(value, place)


def buffers_for(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """The same nesting around buffers of one's own, and these in the order of `signature`."""
    made: list[torch.Tensor] = []

    def make(tensor: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()))
        return made[-1]

    return map_tensors(value, make), made


def copies(value: Any) -> Any:
    """Outputs that are the user's own: nobody writes to them again."""
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return value.clone()
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether images have their channels last; with one channel or one pixel, either layout is both, and counts as neither."""
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


_PLAIN = (bool, int, float, str)


def closure_values(function: Any) -> Callable[[], Hashable]:
    """A question for the plain values that a function sees now.

    >>> def outer():
    ...     weight = 1.0
    ...     def change(to):
    ...         nonlocal weight
    ...         weight = to
    ...     return change, closure_values(lambda: weight)
    >>> change, ask = outer()
    >>> before = ask()
    >>> change(2.0)
    >>> before, ask()
    ((1.0,), (2.0,))
    """
    if not isinstance(function, FunctionType):
        return tuple
    cells = function.__closure__ or ()
    space, names = (
        function.__globals__,
        [
            name
            for name in function.__code__.co_names
            if isinstance(function.__globals__.get(name), _PLAIN)
        ],
    )
    if not cells and not names:
        return tuple
    return lambda: (
        *[content for cell in cells if isinstance(content := _content(cell), _PLAIN)],
        *[space.get(name) for name in names],
    )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing is in it yet.
        return None
