"""New tensors on the default place: `paddle.zeros`, `randn`, `arange` and their like."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat.paddle._dtypes import parse_dtype
from mezzo.compat.paddle._places import default_device
from mezzo.compat.paddle._tensor import Tensor, as_tensor, to_tensor

__all__ = [
    "arange",
    "assign",
    "empty",
    "eye",
    "full",
    "full_like",
    "linspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "randperm",
    "seed",
    "standard_normal",
    "uniform",
    "zeros",
    "zeros_like",
]

Sizes = Any
"""A list or tuple of sizes, a tensor of them, or one size."""


def seed(seed: int) -> torch.Generator:
    """Set the seed of random numbers on all devices.

    >>> _ = seed(100)
    """
    return torch.manual_seed(seed)


def zeros(shape: Sizes, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return zeros, float32 by default.

    >>> zeros([2], "int64").numpy()
    array([0, 0])
    """
    return as_tensor(torch.zeros(_sizes(shape), **_options(dtype)))


def ones(shape: Sizes, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return ones, float32 by default."""
    return as_tensor(torch.ones(_sizes(shape), **_options(dtype)))


def full(shape: Sizes, fill_value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return one value everywhere; float32 by default, int64 and bool for such values.

    >>> full([2], 3).dtype
    torch.int64
    """
    options = _options(dtype)
    if dtype is None and isinstance(fill_value, bool | int):
        options["dtype"] = torch.bool if isinstance(fill_value, bool) else torch.int64
    return as_tensor(torch.full(_sizes(shape), _number(fill_value), **options))


def empty(shape: Sizes, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return uninitialized values."""
    return as_tensor(torch.empty(_sizes(shape), **_options(dtype)))


def eye(
    num_rows: int, num_columns: int | None = None, dtype: Any = None, name: str | None = None
) -> Tensor:
    """Return ones on the diagonal, zeros elsewhere."""
    columns = num_rows if num_columns is None else num_columns
    return as_tensor(torch.eye(num_rows, columns, **_options(dtype)))


def zeros_like(x: torch.Tensor, dtype: Any = None, name: str | None = None) -> Any:
    """Return zeros of the shape of a tensor."""
    return torch.zeros_like(x, dtype=None if dtype is None else parse_dtype(dtype))


def ones_like(x: torch.Tensor, dtype: Any = None, name: str | None = None) -> Any:
    """Return ones of the shape of a tensor."""
    return torch.ones_like(x, dtype=None if dtype is None else parse_dtype(dtype))


def full_like(x: torch.Tensor, fill_value: Any, dtype: Any = None, name: str | None = None) -> Any:
    """Return one value in the shape of a tensor."""
    return torch.full_like(x, fill_value, dtype=None if dtype is None else parse_dtype(dtype))


def arange(
    start: Any = 0, end: Any = None, step: Any = 1, dtype: Any = None, name: str | None = None
) -> Tensor:
    """Return evenly spaced values; int64 if all arguments are ints.

    >>> arange(1, 7, 2).numpy()
    array([1, 3, 5])
    """
    first, last = (0, start) if end is None else (start, end)
    options = {"device": default_device()} if dtype is None else _options(dtype)
    return as_tensor(torch.arange(_number(first), _number(last), _number(step), **options))


def linspace(start: Any, stop: Any, num: int, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return a number of values between two bounds, both included."""
    return as_tensor(torch.linspace(_number(start), _number(stop), int(num), **_options(dtype)))


def rand(shape: Sizes, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return uniform random values in [0, 1)."""
    return as_tensor(torch.rand(_sizes(shape), **_options(dtype)))


def randn(shape: Sizes, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return normally distributed random values.

    >>> randn([2, 3]).shape
    [2, 3]
    """
    return as_tensor(torch.randn(_sizes(shape), **_options(dtype)))


standard_normal = randn


def normal(mean: Any = 0.0, std: Any = 1.0, shape: Sizes = None, name: str | None = None) -> Tensor:
    """Return normally distributed random values with a mean and a standard deviation."""
    if shape is None:
        moments = next((moment for moment in (mean, std) if isinstance(moment, torch.Tensor)), None)
        shape = [1] if moments is None else moments.shape
    return randn(shape) * std + mean  # type: ignore[no-any-return]


def uniform(
    shape: Sizes,
    dtype: Any = None,
    min: float = -1.0,
    max: float = 1.0,
    seed: int = 0,
    name: str | None = None,
) -> Tensor:
    """Return uniform random values between two bounds, -1 and 1 by default."""
    if seed:
        raise ValueError("uniform(seed=) is not supported. Call paddle.seed(...) before.")
    return as_tensor(torch.empty(_sizes(shape), **_options(dtype)).uniform_(min, max))


def randint(
    low: int = 0,
    high: int | None = None,
    shape: Sizes = (1,),
    dtype: Any = None,
    name: str | None = None,
) -> Tensor:
    """Return random integers of [low, high), or of [0, low)."""
    first, last = (0, low) if high is None else (low, high)
    return as_tensor(torch.randint(first, last, _sizes(shape), **_options(dtype or "int64")))


def randperm(n: int, dtype: Any = "int64", name: str | None = None) -> Tensor:
    """Return the numbers below n in random order."""
    return as_tensor(torch.randperm(n, **_options(dtype)))


def assign(x: Any, output: Any = None) -> Any:
    """Return a copy of a tensor or of data, or copy it into `output`."""
    copied = x.clone() if isinstance(x, torch.Tensor) else to_tensor(x)
    if output is None:
        return copied
    output.set_value(copied)
    return output


def _sizes(shape: Sizes) -> list[int]:
    """Return a shape as a list of ints."""
    if isinstance(shape, torch.Tensor):
        shape = shape.tolist()
    sizes = list(shape) if isinstance(shape, list | tuple) else [shape]
    try:
        return [int(size) for size in sizes]
    except (TypeError, ValueError) as error:
        raise TypeError(f"shape should be integers such as [2, 3], got {shape!r}.") from error


def _options(dtype: Any) -> dict[str, Any]:
    return {
        "dtype": torch.float32 if dtype is None else parse_dtype(dtype),
        "device": default_device(),
    }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
