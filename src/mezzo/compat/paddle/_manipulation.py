"""Shapes and selection with Paddle's names and arguments, where torch's meaning agrees."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch

from mezzo.compat.paddle._math import Tensors
from mezzo.compat.paddle._tensor import as_tensor, copy_zero_sizes, split

__all__ = [
    "broadcast_to",
    "chunk",
    "clone",
    "concat",
    "expand",
    "expand_as",
    "flatten",
    "flip",
    "gather",
    "gather_nd",
    "index_sample",
    "index_select",
    "is_tensor",
    "masked_select",
    "meshgrid",
    "moveaxis",
    "nonzero",
    "put_along_axis",
    "rank",
    "repeat_interleave",
    "reshape",
    "roll",
    "shape",
    "slice",
    "split",
    "squeeze",
    "stack",
    "take_along_axis",
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


def gather_nd(x: Tensors, index: Tensors, name: str | None = None) -> Any:
    """Return the slices that the last axis of the indices names.

    >>> gather_nd(torch.eye(2), torch.tensor([[0, 0], [1, 0]])).tolist()
    [1.0, 0.0]
    """
    return x[tuple(index.long().unbind(-1))]


def take_along_axis(arr: Tensors, indices: Tensors, axis: int, broadcast: bool = True) -> Any:
    """Return the value at each index along an axis."""
    index = indices.long()
    if broadcast:
        sizes = [*torch.broadcast_shapes(*(_without(axis, tensor) for tensor in (arr, index)))]
        axis %= arr.dim()
        index = index.expand(*sizes[:axis], index.shape[axis], *sizes[axis:])
        arr = arr.expand(*sizes[:axis], arr.shape[axis], *sizes[axis:])
    return torch.gather(arr, axis, index)


def put_along_axis(
    arr: Tensors, indices: Tensors, values: Any, axis: int, reduce: str = "assign"
) -> Any:
    """Return a copy with values written, or with `reduce="add"` added, at each index."""
    if reduce not in ("assign", "add"):
        raise ValueError(f"reduce={reduce!r} is not supported, only 'assign' and 'add' are.")
    index = indices.long()
    source = torch.as_tensor(values, dtype=arr.dtype, device=arr.device).expand(index.shape)
    if reduce == "add":
        return torch.scatter_add(arr, axis, index, source)
    return torch.scatter(arr, axis, index, source)


def slice(input: Tensors, axes: Sequence[int], starts: Any, ends: Any) -> Any:
    """Return a range of each of several axes."""
    selected = [builtins.slice(None)] * input.dim()
    for axis, start, end in zip(axes, starts, ends, strict=True):
        selected[axis] = builtins.slice(int(start), int(end))
    return input[tuple(selected)]


def clone(x: Tensors, name: str | None = None) -> Any:
    """Return a copy, through which gradients flow."""
    return torch.clone(x)


def rank(input: Tensors) -> Any:
    """Return the number of axes, as a tensor."""
    return as_tensor(torch.tensor(input.dim(), dtype=torch.int32, device=input.device))


def index_sample(x: Tensors, index: Tensors) -> Any:
    """Return values of each row by their column."""
    return torch.gather(x, 1, index.long())


def expand_as(x: Tensors, y: Tensors, name: str | None = None) -> Any:
    """Repeat axes of size one to the shape of another tensor."""
    return x.expand(list(y.shape))


def flip(x: Tensors, axis: Any, name: str | None = None) -> Any:
    """Reverse axes."""
    return torch.flip(x, [axis] if isinstance(axis, int) else list(axis))


def roll(x: Tensors, shifts: Any, axis: Any = None, name: str | None = None) -> Any:
    """Shift values along axes; those at the end come back at the start."""
    return torch.roll(x, shifts, axis)


def repeat_interleave(x: Tensors, repeats: Any, axis: Any = None, name: str | None = None) -> Any:
    """Repeat each slice along an axis."""
    return torch.repeat_interleave(x, repeats, dim=axis)


def moveaxis(x: Tensors, source: Any, destination: Any, name: str | None = None) -> Any:
    """Move axes to other positions."""
    return torch.moveaxis(x, source, destination)


def meshgrid(*args: Any, **kwargs: Any) -> Any:
    """Return the coordinates of a grid, by rows first."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    return list(torch.meshgrid(*tensors, indexing="ij"))


def _without(axis: int, x: Tensors) -> list[int]:
    sizes = list(x.shape)
    del sizes[axis]
    return sizes
