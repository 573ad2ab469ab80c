"""Reductions and products of `megengine.functional`, with its argument names and results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "argmax",
    "argmin",
    "argsort",
    "cumsum",
    "dot",
    "matmul",
    "max",
    "mean",
    "min",
    "norm",
    "normalize",
    "prod",
    "sort",
    "std",
    "sum",
    "topk",
    "var",
]

Axis = int | Sequence[int] | None


def sum(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the sum of all elements, or over axes.

    >>> sum(torch.ones(2, 3), axis=1)
    tensor([3., 3.])
    """
    return torch.sum(inp, _dims(inp, axis), keepdim=keepdims)


def mean(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the mean of all elements, or over axes; integers give float32."""
    values = inp if inp.is_floating_point() else inp.float()
    return torch.mean(values, _dims(inp, axis), keepdim=keepdims)


def prod(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the product of all elements, or over axes."""
    for dim in sorted((dim % inp.dim() for dim in _dims(inp, axis)), reverse=True):
        inp = torch.prod(inp, dim, keepdim=keepdims)
    return inp


def var(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the variance without Bessel's correction, as MegEngine does."""
    return torch.var(inp.float(), _dims(inp, axis), correction=0, keepdim=keepdims)


def std(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the standard deviation without Bessel's correction, as MegEngine does."""
    return torch.std(inp.float(), _dims(inp, axis), correction=0, keepdim=keepdims)


def max(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the largest element, or those over axes: the values alone, unlike `torch.max`."""
    return torch.amax(inp, _dims(inp, axis), keepdim=keepdims)


def min(inp: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Return the smallest element, or those over axes: the values alone, unlike `torch.min`."""
    return torch.amin(inp, _dims(inp, axis), keepdim=keepdims)


def argmax(inp: torch.Tensor, axis: int | None = None, keepdims: bool = False) -> torch.Tensor:
    """Return the indices of the largest elements, as int32."""
    return torch.argmax(inp, axis, keepdim=keepdims).int()


def argmin(inp: torch.Tensor, axis: int | None = None, keepdims: bool = False) -> torch.Tensor:
    """Return the indices of the smallest elements, as int32."""
    return torch.argmin(inp, axis, keepdim=keepdims).int()


def argsort(inp: torch.Tensor, descending: bool = False) -> torch.Tensor:
    """Return the indices that sort the last axis, as int32."""
    return torch.argsort(inp, descending=descending).int()


def sort(inp: torch.Tensor, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last axis sorted, and the indices as int32."""
    values, indices = torch.sort(inp, descending=descending)
    return values, indices.int()


def topk(
    inp: torch.Tensor,
    k: int,
    descending: bool = True,
    kth_only: bool = False,
    no_sort: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest elements of the last axis and their indices, as int32.

    With `descending=False` the smallest, and with `kth_only` the k-th alone.
    """
    values, indices = torch.topk(inp, k, largest=descending, sorted=kth_only or not no_sort)
    if kth_only:
        values, indices = values[..., -1], indices[..., -1]
    return values, indices.int()


def matmul(
    inp1: torch.Tensor,
    inp2: torch.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    compute_mode: str = "default",
) -> torch.Tensor:
    """Return the matrix product; `compute_mode` has no effect, sums are float32."""
    return torch.matmul(inp1.mT if transpose_a else inp1, inp2.mT if transpose_b else inp2)


def dot(inp1: torch.Tensor, inp2: torch.Tensor) -> torch.Tensor:
    """Return the inner product of two vectors."""
    return torch.dot(inp1, inp2)


def norm(
    inp: torch.Tensor, ord: float = 2.0, axis: int | None = None, keepdims: bool = False
) -> torch.Tensor:
    """Return the vector norm of all elements, or over an axis."""
    length: torch.Tensor = torch.linalg.vector_norm(inp, ord, axis, keepdim=keepdims)
    return length


def normalize(
    inp: torch.Tensor, ord: float = 2.0, axis: int | None = None, eps: float = 1e-12
) -> torch.Tensor:
    """Divide by the norm, of at least `eps`."""
    return inp / norm(inp, ord, axis, keepdims=axis is not None).clamp(min=eps)


def cumsum(inp: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the cumulative sum over an axis."""
    return torch.cumsum(inp, axis)


def _dims(inp: torch.Tensor, axis: Axis) -> list[int]:
    if axis is None:
        return list(range(inp.dim()))
    return [axis] if isinstance(axis, int) else list(axis)
