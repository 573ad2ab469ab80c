"""MXNet's reductions, products and ops that change shapes, in torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from mezzo.compat.mxnet import _ops as operators
from mezzo.compat.mxnet.symbol._ops import Bounds, Shape, register

# -- reductions and products -----------------------------------------------------------------------


def _add_reduction(names: str, function: Callable[..., Tensor]) -> None:
    @register(names)
    def run(
        data: Tensor, *, axis: Shape | None = None, keepdims: bool = False, exclude: bool = False
    ) -> Tensor:
        return function(data, axis, keepdims, exclude)


def _add_arg_reduction(name: str, function: Callable[..., Tensor]) -> None:
    @register(name)
    def run(data: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
        return function(data, axis, keepdims)


_add_reduction("sum sum_axis", operators.sum)
_add_reduction("mean", operators.mean)
_add_reduction("max max_axis", operators.max)
_add_reduction("min min_axis", operators.min)
_add_arg_reduction("argmax", operators.argmax)
_add_arg_reduction("argmin", operators.argmin)


@register("norm")
def _norm(
    data: Tensor, *, ord: int = 2, axis: Shape | None = None, keepdims: bool = False
) -> Tensor:
    return operators.norm(data, ord, axis, keepdims)


@register("dot")
def _dot(
    lhs: Tensor, rhs: Tensor, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    return operators.dot(lhs, rhs, transpose_a, transpose_b)


@register("batch_dot")
def _batch_dot(
    lhs: Tensor, rhs: Tensor, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    return operators.batch_dot(lhs, rhs, transpose_a, transpose_b)


# -- shapes ----------------------------------------------------------------------------------------


@register("Flatten flatten")
def _flatten(data: Tensor) -> Tensor:
    return data.flatten(1)


@register("Reshape reshape")
def _reshape(
    data: Tensor,
    *,
    shape: Shape = (),
    reverse: bool = False,
    target_shape: Shape = (),
    keep_highest: bool = False,
) -> Tensor:
    if shape:
        return data.reshape(reshape_sizes(tuple(data.shape), shape, reverse=reverse))
    sizes = [size or -1 for size in target_shape]
    if keep_highest:
        sizes[0] = data.shape[0]
    return data.reshape(sizes)


def reshape_sizes(sizes: Shape, codes: Shape, *, reverse: bool = False) -> Shape:
    """Return the sizes that MXNet's codes give.

    0 copies a size, -1 is inferred, -2 copies all that are left, -3 multiplies two, and -4 splits
    one into the two sizes that follow.

    >>> reshape_sizes((2, 3, 4), (-3, 0)), reshape_sizes((2, 3, 4), (-4, 1, -1, -2))
    ((6, 4), (1, 2, 3, 4))
    """
    source = list(reversed(sizes)) if reverse else list(sizes)
    pending = list(reversed(codes)) if reverse else list(codes)
    result: list[int] = []
    try:
        while pending:
            result += _next_sizes(pending, source)
    except IndexError:
        raise ValueError(f"cannot reshape {sizes} to {codes}") from None
    if -1 in result:
        result[result.index(-1)] = prod(sizes) // prod(size for size in result if size != -1)
    return tuple(reversed(result)) if reverse else tuple(result)


def _next_sizes(codes: list[int], source: list[int]) -> list[int]:
    """Remove a code and the sizes that it stands for; return the sizes of the result."""
    code = codes.pop(0)
    match code:
        case 0:
            return [source.pop(0)]
        case -2:
            left = source[:]
            source.clear()
            return left
        case -3:
            return [source.pop(0) * source.pop(0)]
        case -4:
            size, first, second = source.pop(0), codes.pop(0), codes.pop(0)
            first = size // second if first == -1 else first
            return [first, size // first if second == -1 else second]
    # A number stands for one size, if there is one left.
    del source[:1]
    return [code]


@register("reshape_like")
def _reshape_like(lhs: Tensor, rhs: Tensor) -> Tensor:
    return lhs.reshape(rhs.shape)


@register("transpose")
def _transpose(data: Tensor, *, axes: Shape = ()) -> Tensor:
    return data.permute(axes or tuple(reversed(range(data.dim()))))


@register("SwapAxis swapaxes")
def _swap_axes(data: Tensor, *, dim1: int = 0, dim2: int = 0) -> Tensor:
    return data.transpose(dim1, dim2)


@register("expand_dims")
def _expand_dims(data: Tensor, *, axis: int) -> Tensor:
    return data.unsqueeze(axis)


@register("squeeze")
def _squeeze(data: Tensor, *, axis: Shape | None = None) -> Tensor:
    result = data.squeeze() if axis is None else data.squeeze(axis)
    return result if result.dim() else result.reshape(1)


@register("Concat concat")
def _concat(*data: Tensor, dim: int = 1) -> Tensor:
    return torch.cat(data, dim)


@register("stack")
def _stack(*args: Tensor, axis: int = 0) -> Tensor:
    return torch.stack(args, axis)


@register("SliceChannel split", outputs=lambda attributes: int(attributes["num_outputs"]))
def _slice_channel(
    data: Tensor, *, num_outputs: int, axis: int = 1, squeeze_axis: bool = False
) -> list[Tensor]:
    parts = data.chunk(num_outputs, axis)
    return [part.squeeze(axis) if squeeze_axis else part for part in parts]


@register("slice_axis")
def _slice_axis(data: Tensor, *, axis: int, begin: int, end: int | None) -> Tensor:
    return operators.slice_axis(data, axis, begin, end)


@register("slice crop")
def _slice(data: Tensor, *, begin: Bounds, end: Bounds, step: Bounds = ()) -> Tensor:
    for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
        stride = (step[axis] if axis < len(step) else None) or 1
        if stride < 0:
            places = range(data.shape[axis])[slice(first, last, stride)]
            data = data.index_select(axis, torch.tensor(list(places), device=data.device))
        else:
            data = data[(slice(None),) * axis + (slice(first, last, stride),)]
    return data


@register("slice_like")
def _slice_like(data: Tensor, shape_like: Tensor, *, axes: Shape = ()) -> Tensor:
    for axis in axes or range(data.dim()):
        data = data.narrow(axis, 0, shape_like.shape[axis])
    return data


@register("tile")
def _tile(data: Tensor, *, reps: Shape) -> Tensor:
    return data.tile(reps)


@register("repeat")
def _repeat(data: Tensor, *, repeats: int, axis: int | None = None) -> Tensor:
    return data.repeat_interleave(repeats, axis)


@register("broadcast_axis broadcast_axes")
def _broadcast_axis(data: Tensor, *, axis: Shape = (), size: Shape = ()) -> Tensor:
    sizes = list(data.shape)
    for place, extent in zip(axis, size, strict=True):
        sizes[place] = extent
    return data.expand(sizes)


@register("broadcast_to")
def _broadcast_to(data: Tensor, *, shape: Shape) -> Tensor:
    return data.expand([new or old for new, old in zip(shape, data.shape, strict=True)])


@register("broadcast_like")
def _broadcast_like(lhs: Tensor, rhs: Tensor) -> Tensor:
    return lhs.expand(rhs.shape)


@register("take", allowed={"mode": ("clip", "wrap")}, float32="indices")
def _take(a: Tensor, indices: Tensor, *, axis: int = 0, mode: str = "clip") -> Tensor:
    return operators.take(a, indices, axis, mode)


@register("pick", allowed={"mode": ("clip",)}, float32="index")
def _pick(data: Tensor, index: Tensor, *, axis: int = -1, keepdims: bool = False) -> Tensor:
    return operators.pick(data, index, axis, keepdims)


@register("one_hot", float32="indices")
def _one_hot(
    indices: Tensor,
    *,
    depth: int,
    on_value: float = 1.0,
    off_value: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return operators.one_hot(indices, depth, on_value, off_value).to(dtype)
