"""Shapes and selection with Paddle's names and arguments, where torch's meaning agrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mezzo.compat.paddle._math import Tensors
from mezzo.compat.paddle._tensor import as_tensor, copy_zero_sizes, split

__all__ = [
    "broadcast_to",
    "chunk",
    "concat",
    "expand",
    "flatten",
    "gather",
    "index_select",
    "is_tensor",
    "masked_select",
    "nonzero",
    "reshape",
    "shape",
    "split",
    "squeeze",
    "stack",
    "tile",
    "transpose",
    "tril",
    "triu",
    "unbind",
    "unsqueeze",
    "unstack",
    "where",
]


def shape(input: Tensors) -> Any:
    """Return the sizes as an int32 tensor, as Paddle does."""
    return as_tensor(torch.tensor(list(input.shape), dtype=torch.int32, device=input.device))


def reshape(x: Tensors, shape: Any, name: str | None = None) -> Any:
    """Return a tensor in another shape; -1 is computed, and 0 copies the size of that axis.

    >>> reshape(torch.ones(2, 3, 4), [0, -1]).shape
    torch.Size([2, 12])
    """
    return torch.reshape(x, copy_zero_sizes(x, [int(size) for size in shape]))


def transpose(x: Tensors, perm: Sequence[int], name: str | None = None) -> Any:
    """Permute all axes.

    >>> transpose(torch.ones(2, 3, 4), perm=[1, 0, 2]).shape
    torch.Size([3, 2, 4])
    """
    return torch.permute(x, tuple(perm))


def flatten(x: Tensors, start_axis: int = 0, stop_axis: int = -1, name: str | None = None) -> Any:
    """Flatten a range of axes."""
    return torch.flatten(x, start_axis, stop_axis)


def squeeze(x: Tensors, axis: Any = None, name: str | None = None) -> Any:
    """Remove axes of size one."""
    if axis is None:
        return torch.squeeze(x)
    return torch.squeeze(x, tuple(axis) if isinstance(axis, list | tuple) else axis)


def unsqueeze(x: Tensors, axis: Any, name: str | None = None) -> Any:
    """Insert axes of size one."""
    for dim in axis if isinstance(axis, list | tuple) else [axis]:
        x = torch.unsqueeze(x, int(dim))
    return x


def concat(x: Sequence[Tensors], axis: Any = 0, name: str | None = None) -> Any:
    """Join tensors along an axis.

    >>> concat([torch.ones(1, 2), torch.ones(1, 2)], axis=1).shape
    torch.Size([1, 4])
    """
    return torch.cat(list(x), int(axis))


def stack(x: Sequence[Tensors], axis: int = 0, name: str | None = None) -> Any:
    """Join tensors along a new axis."""
    return torch.stack(list(x), axis)


def chunk(x: Tensors, chunks: int, axis: int = 0, name: str | None = None) -> Any:
    """Split into a number of parts."""
    return list(torch.chunk(x, chunks, axis))


def unbind(input: Tensors, axis: int = 0) -> Any:
    """Return the slices along an axis."""
    return list(torch.unbind(input, axis))


def unstack(x: Tensors, axis: int = 0, num: int | None = None) -> Any:
    """Return the slices along an axis."""
    return unbind(x, axis)


def expand(x: Tensors, shape: Any, name: str | None = None) -> Any:
    """Repeat axes of size one."""
    return x.expand([int(size) for size in shape])


broadcast_to = expand


def tile(x: Tensors, repeat_times: Any, name: str | None = None) -> Any:
    """Repeat a tensor along each axis."""
    return torch.tile(x, tuple(int(times) for times in repeat_times))


def tril(x: Tensors, diagonal: int = 0, name: str | None = None) -> Any:
    """Return the lower triangle."""
    return torch.tril(x, diagonal)


def triu(x: Tensors, diagonal: int = 0, name: str | None = None) -> Any:
    """Return the upper triangle."""
    return torch.triu(x, diagonal)


# -- selection -------------------------------------------------------------------------------------


def gather(x: Tensors, index: Tensors, axis: Any = None, name: str | None = None) -> Any:
    """Return slices along an axis by number; torch calls this `index_select`."""
    return torch.index_select(x, int(axis or 0), index.reshape(-1))


def index_select(x: Tensors, index: Tensors, axis: int = 0, name: str | None = None) -> Any:
    """Return slices along an axis by number."""
    return torch.index_select(x, axis, index)


def masked_select(x: Tensors, mask: Tensors, name: str | None = None) -> Any:
    """Return the values where a mask is true."""
    return torch.masked_select(x, mask)


def where(condition: Tensors, x: Any = None, y: Any = None, name: str | None = None) -> Any:
    """Return values of x or y, or without them the indices where the condition is true."""
    return torch.where(condition) if x is None else torch.where(condition, x, y)


def nonzero(x: Tensors, as_tuple: bool = False) -> Any:
    """Return the indices of values that are not zero."""
    return torch.nonzero(x, as_tuple=True) if as_tuple else torch.nonzero(x)


def is_tensor(x: Any) -> bool:
    """Return whether this is a tensor."""
    return isinstance(x, torch.Tensor)
