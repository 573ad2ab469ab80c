"""`paddle.static.InputSpec`: shape and dtype of an input, for `paddle.Model` and `to_static`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzo._dtypes import dtype_name
from mezzo.compat.paddle._dtypes import parse_dtype


@dataclass(frozen=True)
class InputSpec:
    """`paddle.static.InputSpec`: describes an input; -1 or None is a size that may differ.

    `paddle.Model` counts them to separate inputs from labels. `paddle.jit.to_static` accepts them
    without effect: shapes are taken from the calls.

    >>> InputSpec([None, 784], "float32", "x")
    InputSpec(shape=(-1, 784), dtype='float32', name='x', stop_gradient=False)
    """

    shape: Sequence[int | None]
    dtype: Any = "float32"
    name: str | None = None
    stop_gradient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shape, list | tuple):
            raise TypeError(
                "The type of 'shape' in InputSpec must be list or tuple, but received"
                f" {type(self.shape).__name__}. Pass shape=[None, 784], for example."
            )
        object.__setattr__(
            self, "shape", tuple(-1 if size is None else int(size) for size in self.shape)
        )
        object.__setattr__(self, "dtype", dtype_name(parse_dtype(self.dtype)))

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, name: str | None = None) -> InputSpec:
        """Return the spec of a tensor.

        >>> InputSpec.from_tensor(torch.ones(2, 3)).shape
        (2, 3)
        """
        return cls(tuple(tensor.shape), tensor.dtype, name)

    @classmethod
    def from_numpy(cls, ndarray: Any, name: str | None = None) -> InputSpec:
        """Return the spec of an array."""
        return cls(tuple(ndarray.shape), ndarray.dtype, name)
