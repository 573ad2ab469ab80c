"""MXNet's operators on tensors, where its names or meanings differ from torch's.

`mxnet.nd` has them as functions and `NDArray` those of `METHODS` as methods.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from mezzo._errors import UnsupportedError

Tensor = torch.Tensor
Axis = int | Sequence[int] | None

# -- reductions ------------------------------------------------------------------------------------
# Over all axes they give shape (1,), as in MXNet, whose programs read `loss.mean().asnumpy()[0]`.


def sum(data: Tensor, axis: Axis = None, keepdims: bool = False, exclude: bool = False) -> Tensor:
    """Sum over axes, or with `exclude` over the other axes."""
    total = torch.sum(data, _axes(data, axis, exclude), keepdim=keepdims)
    # torch's sum of integers is int64.
    return _at_least_1d(total if data.is_floating_point() else total.to(data.dtype))


def mean(data: Tensor, axis: Axis = None, keepdims: bool = False, exclude: bool = False) -> Tensor:
    """Average over axes, or with `exclude` over the other axes."""
    return _at_least_1d(torch.mean(data, _axes(data, axis, exclude), keepdim=keepdims))


def max(data: Tensor, axis: Axis = None, keepdims: bool = False, exclude: bool = False) -> Tensor:
    """Return the largest values, without their indices."""
    return _at_least_1d(torch.amax(data, _axes(data, axis, exclude), keepdim=keepdims))


def min(data: Tensor, axis: Axis = None, keepdims: bool = False, exclude: bool = False) -> Tensor:
    """Return the smallest values, without their indices."""
    return _at_least_1d(torch.amin(data, _axes(data, axis, exclude), keepdim=keepdims))


def norm(data: Tensor, ord: int = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the norm."""
    axes = _axes(data, axis, exclude=False)
    return _at_least_1d(torch.linalg.vector_norm(data, ord, dim=axes, keepdim=keepdims))


def argmax(data: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the indices of the largest values, as float32 like MXNet."""
    return _at_least_1d(torch.argmax(data, axis, keepdim=keepdims).float())


def argmin(data: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the indices of the smallest values, as float32 like MXNet."""
    return _at_least_1d(torch.argmin(data, axis, keepdim=keepdims).float())


def argsort(data: Tensor, axis: int = -1, is_ascend: bool = True) -> Tensor:
    """Return the indices that sort, as float32 like MXNet."""
    return torch.argsort(data, dim=axis, descending=not is_ascend, stable=True).float()


def _at_least_1d(data: Tensor) -> Tensor:
    return data.reshape(1) if data.dim() == 0 else data


def _axes(data: Tensor, axis: Axis, exclude: bool) -> list[int]:
    every = list(range(data.dim()))
    if axis is None or axis == ():
        return [] if exclude and data.dim() == 0 else every
    named = {index % data.dim() for index in ([axis] if isinstance(axis, int) else axis)}
    return [index for index in every if (index in named) != exclude]


# -- shapes ----------------------------------------------------------------------------------------


_KEEP, _KEEP_ALL, _JOIN = 0, -2, -3
"""Codes in a shape for `reshape`."""


def reshape(data: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
    """Reshape: 0 keeps a dimension, -1 is inferred, -2 keeps all others, -3 joins two, as in MXNet.

    >>> reshape(torch.ones(2, 3, 4), (0, -1)).shape
    torch.Size([2, 12])
    """
    sizes = kwargs.get("shape", shape)
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    result, position = list[int](), 0
    for size in sizes:
        if size < _JOIN:
            raise UnsupportedError(
                f"reshape got {tuple(sizes)}: the code {size} is not supported. Pass the sizes"
                " that it stands for."
            )
        end = data.dim() if size == _KEEP_ALL else position + (2 if size == _JOIN else 1)
        taken = data.shape[position:end]
        position = end
        if size == _KEEP_ALL:
            result.extend(taken)
        else:
            result.append(taken.numel() if size in (_KEEP, _JOIN) else size)
    return torch.reshape(data, result)


def flatten(data: Tensor) -> Tensor:
    """Join all dimensions but the first."""
    return torch.reshape(data, (data.shape[0], -1))


def transpose(data: Tensor, *axes: Any, **kwargs: Any) -> Tensor:
    """Permute the axes, or reverse them."""
    order = kwargs.get("axes", axes[0] if len(axes) == 1 else axes)
    return torch.permute(data, tuple(order) or tuple(reversed(range(data.dim()))))


def swapaxes(data: Tensor, dim1: int = 0, dim2: int = 0) -> Tensor:
    """Exchange two axes."""
    return torch.transpose(data, dim1, dim2)


def expand_dims(data: Tensor, axis: int) -> Tensor:
    """Insert an axis of size 1."""
    return torch.unsqueeze(data, axis)


def squeeze(data: Tensor, axis: Axis = None) -> Tensor:
    """Remove axes of size 1."""
    if axis is None:
        return torch.squeeze(data)
    return torch.squeeze(data, (axis,) if isinstance(axis, int) else tuple(axis))


def broadcast_to(data: Tensor, shape: Sequence[int]) -> Tensor:
    """Broadcast to a shape; 0 keeps a dimension."""
    return torch.broadcast_to(data, [size or data.shape[index] for index, size in enumerate(shape)])


def tile(data: Tensor, reps: int | Sequence[int]) -> Tensor:
    """Repeat the whole array along each axis."""
    return torch.tile(data, (reps,) if isinstance(reps, int) else tuple(reps))


def repeat(data: Tensor, repeats: int, axis: int | None = None) -> Tensor:
    """Repeat each element."""
    return torch.repeat_interleave(data, repeats, axis)


def concat(*data: Any, dim: int = 1) -> Tensor:
    """Join arrays along an axis, by default the second."""
    return torch.cat(_flat(data), dim)


def stack(*data: Any, axis: int = 0) -> Tensor:
    """Join arrays along a new axis."""
    return torch.stack(_flat(data), axis)


def split(
    data: Tensor, num_outputs: int, axis: int = 1, squeeze_axis: bool = False
) -> Tensor | list[Tensor]:
    """Split into equal parts along an axis, by default the second."""
    if data.shape[axis] % num_outputs:
        raise ValueError(
            f"split cannot divide axis {axis} of size {data.shape[axis]} into {num_outputs} equal"
            " parts. Pass a num_outputs that divides it."
        )
    parts = list(torch.chunk(data, num_outputs, axis))
    parts = [part.squeeze(axis) for part in parts] if squeeze_axis else parts
    return parts[0] if num_outputs == 1 else parts


def _flat(data: Sequence[Any]) -> list[Tensor]:
    return list(data[0] if len(data) == 1 and isinstance(data[0], list | tuple) else data)


# -- indices ---------------------------------------------------------------------------------------


def slice_axis(data: Tensor, axis: int, begin: int, end: int | None) -> Tensor:
    """Return `begin:end` of an axis."""
    index = [slice(None)] * data.dim()
    index[axis] = slice(begin, end)
    return data[tuple(index)]


def take(data: Tensor, indices: Tensor, axis: int = 0, mode: str = "clip") -> Tensor:
    """Return the slices of an axis at these indices; indices outside are clipped or wrapped."""
    size, index = data.shape[axis], indices.long()
    index = index % size if mode == "wrap" else index.clamp(0, size - 1)
    taken = torch.index_select(data, axis, index.reshape(-1))
    return taken.unflatten(axis, index.shape) if index.dim() != 1 else taken


def pick(data: Tensor, index: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
    """Return one element of an axis for each position; indices outside are clipped.

    >>> pick(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.0, 1.0]))
    tensor([1., 4.])
    """
    positions = index.long().clamp(0, data.shape[axis] - 1)
    if positions.dim() < data.dim():
        positions = positions.unsqueeze(axis)
    picked = torch.gather(data, axis, positions)
    return picked if keepdims else picked.squeeze(axis)


def one_hot(indices: Tensor, depth: int, on_value: float = 1.0, off_value: float = 0.0) -> Tensor:
    """Return one-hot float32 vectors; an index outside gives `off_value` only."""
    classes = torch.arange(depth, device=indices.device)
    hit = indices.long().unsqueeze(-1) == classes
    return torch.where(hit, on_value, off_value)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return `x` where the condition is not 0, else `y`."""
    return torch.where(condition.bool(), x, y)


# -- networks --------------------------------------------------------------------------------------


def dot(lhs: Tensor, rhs: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Multiply: the last axis of the first with the first axis of the second."""
    lhs = torch.permute(lhs, tuple(reversed(range(lhs.dim())))) if transpose_a else lhs
    rhs = torch.permute(rhs, tuple(reversed(range(rhs.dim())))) if transpose_b else rhs
    if lhs.dim() == rhs.dim() == 1:
        return torch.dot(lhs, rhs).reshape(1)
    product: Tensor = torch.tensordot(lhs, rhs, dims=1)
    return product


def batch_dot(
    lhs: Tensor, rhs: Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """Multiply batches of matrices."""
    lhs = lhs.transpose(-1, -2) if transpose_a else lhs
    return torch.bmm(lhs, rhs.transpose(-1, -2) if transpose_b else rhs)


def softmax(data: Tensor, axis: int = -1, temperature: float | None = None) -> Tensor:
    """Return the softmax."""
    return torch.softmax(data / temperature if temperature else data, axis)


def log_softmax(data: Tensor, axis: int = -1, temperature: float | None = None) -> Tensor:
    """Return the logarithm of the softmax."""
    return torch.log_softmax(data / temperature if temperature else data, axis)


def smooth_l1(data: Tensor, scalar: float = 1.0) -> Tensor:
    """Return the smooth L1 function of each element."""
    edge = 1.0 / scalar**2
    size = torch.abs(data)
    return torch.where(size > edge, size - 0.5 * edge, 0.5 * torch.square(data * scalar))


def Activation(data: Tensor, act_type: str) -> Tensor:
    """Apply relu, sigmoid, tanh, softrelu or softsign."""
    function = _ACTIVATIONS.get(act_type)
    if function is None:
        raise ValueError(
            f"Unknown act_type {act_type!r}. Choose one of: {', '.join(_ACTIVATIONS)}."
        )
    return function(data)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softrelu": functional.softplus,
    "softsign": functional.softsign,
}


def FullyConnected(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_hidden: int | None = None,
    no_bias: bool = False,
    flatten: bool = True,
) -> Tensor:
    """Apply a linear layer, by default to all dimensions but the first as one."""
    data = torch.flatten(data, 1) if flatten else data
    return functional.linear(data, weight, None if no_bias else bias)


def Convolution(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kernel: Sequence[int] | None = None,
    stride: int | Sequence[int] = 1,
    dilate: int | Sequence[int] = 1,
    pad: int | Sequence[int] = 0,
    num_filter: int | None = None,
    num_group: int = 1,
    no_bias: bool = False,
) -> Tensor:
    """Apply a convolution of one, two or three dimensions."""
    dimensions = data.dim() - 2
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[dimensions - 1]
    sizes = [
        (value,) * dimensions if isinstance(value, int) else tuple(value)
        for value in (stride, pad, dilate)
    ]
    result: Tensor = function(data, weight, None if no_bias else bias, *sizes, num_group)
    return result


# -- comparisons -----------------------------------------------------------------------------------


def _comparison(function: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def compare(lhs: Tensor, rhs: Any) -> Tensor:
        return function(lhs, rhs).to(lhs.dtype)

    compare.__doc__ = f"Return 1 where `{function.__name__}` holds and 0 elsewhere, in lhs's dtype."
    return compare


equal = _comparison(operator.eq)
not_equal = _comparison(operator.ne)
greater = _comparison(operator.gt)
greater_equal = _comparison(operator.ge)
lesser = _comparison(operator.lt)
lesser_equal = _comparison(operator.le)

METHODS = (
    "sum mean max min norm argmax argmin argsort reshape flatten transpose swapaxes expand_dims"
    " squeeze broadcast_to tile repeat split slice_axis take pick one_hot softmax log_softmax dot"
).split()
"""The operators that are methods of `NDArray` too."""

COMPARISONS = {
    "__eq__": equal,
    "__ne__": not_equal,
    "__gt__": greater,
    "__ge__": greater_equal,
    "__lt__": lesser,
    "__le__": lesser_equal,
}
