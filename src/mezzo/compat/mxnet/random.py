"""`mxnet.random` and `mxnet.nd.random`: the seed, and arrays of random values."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._context import Context, current_context
from mezzo.compat.mxnet._dtype import torch_dtype
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, on_arrays
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["multinomial", "normal", "randint", "randn", "seed", "shuffle", "uniform"]

Shape = int | tuple[int, ...] | list[int]


def seed(seed_state: int, ctx: Any = "all") -> None:
    """Seed torch's generators of all devices.

    >>> seed(1)
    >>> first = uniform(shape=3)
    >>> seed(1)
    >>> bool((first == uniform(shape=3)).all())
    True
    """
    torch.manual_seed(seed_state)


def uniform(
    low: float = 0.0,
    high: float = 1.0,
    shape: Shape = (1,),
    dtype: Any = None,
    ctx: Context | None = None,
) -> NDArray:
    """Return values that are uniformly distributed in [low, high)."""
    context, made = _empty(shape, dtype, ctx)
    return as_ndarray(context.place(made.uniform_(low, high)))


def normal(
    loc: float = 0.0,
    scale: float = 1.0,
    shape: Shape = (1,),
    dtype: Any = None,
    ctx: Context | None = None,
) -> NDArray:
    """Return normally distributed values."""
    context, made = _empty(shape, dtype, ctx)
    return as_ndarray(context.place(made.normal_(loc, scale)))


def randn(*shape: int, loc: float = 0.0, scale: float = 1.0, **kwargs: Any) -> NDArray:
    """Return normally distributed values of a shape."""
    return normal(loc, scale, shape or (1,), **kwargs)


def randint(
    low: int,
    high: int,
    shape: Shape = (1,),
    dtype: Any = "int32",
    ctx: Context | None = None,
) -> NDArray:
    """Return integers in [low, high)."""
    context, made = _empty(shape, dtype, ctx)
    return as_ndarray(context.place(made.random_(low, high)))


@on_arrays
def shuffle(data: torch.Tensor) -> torch.Tensor:
    """Return the rows in random order."""
    return data[torch.randperm(len(data), device=data.device)]


@on_arrays
def multinomial(data: torch.Tensor, shape: int = 1, dtype: Any = "int32") -> torch.Tensor:
    """Return indices drawn from the probabilities of the last axis."""
    drawn = torch.multinomial(data, shape, replacement=True).to(torch_dtype(dtype))
    return drawn.squeeze(-1) if shape == 1 else drawn


def _empty(shape: Shape | None, dtype: Any, ctx: Context | None) -> tuple[Context, torch.Tensor]:
    context = ctx or current_context()
    sizes = (shape,) if isinstance(shape, int) else tuple(shape or (1,))
    return context, torch.empty(sizes, dtype=torch_dtype(dtype), device=context.device)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
