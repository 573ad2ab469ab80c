"""Arithmetic, reductions and gradients with Paddle's names and arguments, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from mezzo.compat.paddle._dtypes import parse_dtype
from mezzo.compat.paddle._tensor import as_tensor

__all__ = [
    "add_n",
    "addmm",
    "all",
    "allclose",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "cast",
    "clip",
    "cumsum",
    "einsum",
    "grad",
    "logsumexp",
    "matmul",
    "max",
    "mean",
    "min",
    "multinomial",
    "norm",
    "numel",
    "pow",
    "prod",
    "round",
    "scale",
    "sort",
    "std",
    "sum",
    "topk",
    "var",
]

Tensors = Any
"""A tensor of Paddle or torch, or a variable of a static program."""

_UNARY = (
    "abs acos asin atan ceil cos cosh erf exp expm1 floor isfinite isinf isnan log log10 log1p log2"
    " logical_not neg reciprocal rsqrt sigmoid sign sin sinh sqrt square tan tanh t"
).split()
"""Functions of one tensor with the same name and meaning in both systems."""

_BINARY = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "divide": torch.true_divide,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "mod": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater_than": torch.gt,
    "greater_equal": torch.ge,
    "less_than": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "dot": torch.linalg.vecdot,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "mv": torch.mv,
    "outer": torch.outer,
    "atan2": torch.atan2,
}
"""Functions of two tensors: Paddle's name → torch's function."""


def _unary(name: str) -> Callable[..., Any]:
    """Return a function of one tensor with Paddle's arguments."""
    function = getattr(torch, name)

    def call(x: Tensors, name: str | None = None) -> Any:
        return function(x)

    return _named(call, name, f"Return torch's `{name}`.")


def _binary(name: str) -> Callable[..., Any]:
    """Return a function of two tensors with Paddle's arguments."""
    function = _BINARY[name]

    def call(x: Tensors, y: Tensors, name: str | None = None) -> Any:
        return function(x, y)

    return _named(call, name, f"Return torch's `{function.__name__}`.")


def _named(function: Callable[..., Any], name: str, summary: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = summary
    return function


globals().update({name: _unary(name) for name in _UNARY})
globals().update({name: _binary(name) for name in _BINARY})
__all__ += [*_UNARY, *_BINARY]  # noqa: PLE0604 - strings


def matmul(
    x: Tensors,
    y: Tensors,
    transpose_x: bool = False,
    transpose_y: bool = False,
    name: str | None = None,
) -> Any:
    """Return the matrix product.

    >>> matmul(torch.ones(2, 3), torch.ones(4, 3), transpose_y=True).shape
    torch.Size([2, 4])
    """
    return torch.matmul(x.mT if transpose_x else x, y.mT if transpose_y else y)


def einsum(equation: str, *operands: Tensors) -> Any:
    """Return an Einstein sum."""
    return torch.einsum(equation, *operands)


def pow(x: Tensors, y: Any, name: str | None = None) -> Any:
    """Return a power."""
    return torch.pow(x, y)


def scale(
    x: Tensors,
    scale: Any = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Return `scale * x + bias`, or `scale * (x + bias)`."""
    result = x * scale + bias if bias_after_scale else (x + bias) * scale
    return result if act is None else getattr(torch, act)(result)


def clip(x: Tensors, min: Any = None, max: Any = None, name: str | None = None) -> Any:
    """Limit values to a range."""
    return torch.clip(x, min, max)


def cast(x: Tensors, dtype: Any) -> Any:
    """Cast to a dtype, given as itself or by name."""
    return x.to(dtype=parse_dtype(dtype))


# -- reductions ------------------------------------------------------------------------------------


def _axes(axis: Any, keepdim: bool) -> dict[str, Any]:
    """Return torch's arguments for Paddle's `axis` and `keepdim`; None reduces all axes."""
    dim = tuple(axis) if isinstance(axis, list | tuple) else axis
    return {"dim": dim, "keepdim": keepdim}


def mean(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return the mean.

    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), axis=[1]).tolist()
    [1.5, 3.5]
    """
    return torch.mean(x, **_axes(axis, keepdim))


def sum(
    x: Tensors, axis: Any = None, dtype: Any = None, keepdim: bool = False, name: str | None = None
) -> Any:
    """Return the sum."""
    wanted = None if dtype is None else parse_dtype(dtype)
    return torch.sum(x, **_axes(axis, keepdim), dtype=wanted)


def max(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return the largest values, without their indices."""
    return torch.amax(x, **_axes(() if axis is None else axis, keepdim))


def min(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return the smallest values, without their indices."""
    return torch.amin(x, **_axes(() if axis is None else axis, keepdim))


def prod(
    x: Tensors, axis: int | None = None, keepdim: bool = False, dtype: Any = None, name: Any = None
) -> Any:
    """Return the product."""
    wanted = None if dtype is None else parse_dtype(dtype)
    if axis is None:
        return torch.prod(x, dtype=wanted)
    return torch.prod(x, axis, keepdim, dtype=wanted)


def std(
    x: Tensors, axis: Any = None, unbiased: bool = True, keepdim: bool = False, name: Any = None
) -> Any:
    """Return the standard deviation."""
    return torch.std(x, **_axes(axis, keepdim), correction=int(unbiased))


def var(
    x: Tensors, axis: Any = None, unbiased: bool = True, keepdim: bool = False, name: Any = None
) -> Any:
    """Return the variance."""
    return torch.var(x, **_axes(axis, keepdim), correction=int(unbiased))


def all(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return whether all values are true."""
    return torch.all(x) if axis is None else torch.all(x, **_axes(axis, keepdim))


def any(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return whether a value is true."""
    return torch.any(x) if axis is None else torch.any(x, **_axes(axis, keepdim))


def logsumexp(x: Tensors, axis: Any = None, keepdim: bool = False, name: Any = None) -> Any:
    """Return the logarithm of the sum of exponentials."""
    return torch.logsumexp(x, **_axes(tuple(range(x.dim())) if axis is None else axis, keepdim))


def norm(
    x: Tensors, p: Any = None, axis: Any = None, keepdim: bool = False, name: str | None = None
) -> Any:
    """Return the norm of a vector, the 2-norm by default.

    `p="fro"` is the op `frobenius_norm`, which the black list of O1 has; others are `p_norm`.
    """
    if p == "fro" and not isinstance(axis, int):
        dims = None if axis is None else tuple(axis)
        return torch.linalg.norm(x, None if dims is None else "fro", dims, keepdim)
    order = 2 if p in (None, "fro") else p
    return torch.linalg.vector_norm(x, order, **_axes(axis, keepdim))


def argmax(
    x: Tensors,
    axis: int | None = None,
    keepdim: bool = False,
    dtype: Any = "int64",
    name: Any = None,
) -> Any:
    """Return the index of the largest value."""
    return torch.argmax(x, axis, keepdim).to(parse_dtype(dtype))


def argmin(
    x: Tensors,
    axis: int | None = None,
    keepdim: bool = False,
    dtype: Any = "int64",
    name: Any = None,
) -> Any:
    """Return the index of the smallest value."""
    return torch.argmin(x, axis, keepdim).to(parse_dtype(dtype))


def cumsum(x: Tensors, axis: int | None = None, dtype: Any = None, name: str | None = None) -> Any:
    """Return the cumulative sum; of all values in order without an axis."""
    wanted = None if dtype is None else parse_dtype(dtype)
    return torch.cumsum(x.flatten() if axis is None else x, axis or 0, dtype=wanted)


def topk(
    x: Tensors,
    k: Any,
    axis: int | None = None,
    largest: bool = True,
    sorted: bool = True,
    name: str | None = None,
) -> Any:
    """Return the largest values and their indices."""
    return torch.topk(x, int(k), -1 if axis is None else axis, largest, sorted)


def sort(x: Tensors, axis: int = -1, descending: bool = False, name: str | None = None) -> Any:
    """Return sorted values, without their indices."""
    return torch.sort(x, dim=axis, descending=descending).values


def argsort(x: Tensors, axis: int = -1, descending: bool = False, name: str | None = None) -> Any:
    """Return the indices that sort a tensor."""
    return torch.argsort(x, dim=axis, descending=descending)


def numel(x: Tensors, name: str | None = None) -> Any:
    """Return the number of elements, as a tensor."""
    return as_tensor(torch.tensor(x.numel(), device=x.device))


def amax(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return the largest values along axes; equal ones share the gradient."""
    return torch.amax(x, () if axis is None else axis, keepdim)


def amin(x: Tensors, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Return the smallest values along axes; equal ones share the gradient."""
    return torch.amin(x, () if axis is None else axis, keepdim)


def round(x: Tensors, decimals: int = 0, name: str | None = None) -> Any:
    """Return the nearest integers."""
    return torch.round(x, decimals=decimals) if decimals else torch.round(x)


def addmm(
    input: Tensors,
    x: Tensors,
    y: Tensors,
    beta: float = 1.0,
    alpha: float = 1.0,
    name: str | None = None,
) -> Any:
    """Return `beta * input + alpha * (x @ y)`."""
    return torch.addmm(input, x, y, beta=beta, alpha=alpha)


def add_n(inputs: Any, name: str | None = None) -> Any:
    """Return the sum of tensors."""
    return inputs if isinstance(inputs, torch.Tensor) else reduce(torch.add, inputs)


def allclose(
    x: Tensors,
    y: Tensors,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    name: str | None = None,
) -> Any:
    """Return whether all values are close, as a tensor."""
    return as_tensor(torch.tensor(torch.allclose(x, y, rtol, atol, equal_nan), device=x.device))


def multinomial(
    x: Tensors, num_samples: int = 1, replacement: bool = False, name: str | None = None
) -> Any:
    """Return indices that are drawn by their weights."""
    return torch.multinomial(x, num_samples, replacement)


# -- gradients -------------------------------------------------------------------------------------


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool = False,
    no_grad_vars: Any = None,
) -> list[Any]:
    """Return the gradients of outputs with respect to inputs, as a list.

    >>> x = torch.ones(2, requires_grad=True)
    >>> grad([(x * 3).sum()], [x])[0].numpy()
    array([3., 3.], dtype=float32)
    """
    if no_grad_vars is not None:
        raise ValueError("no_grad_vars is not supported. Detach these tensors: x.detach().")
    gradients = torch.autograd.grad(
        outputs,
        inputs,
        grad_outputs,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
    )
    return [None if gradient is None else as_tensor(gradient) for gradient in gradients]
