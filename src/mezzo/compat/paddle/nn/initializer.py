"""`paddle.nn.initializer`: how a parameter's first values are drawn, and `ParamAttr`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch.nn import init

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS

__all__ = [
    "Assign",
    "Constant",
    "KaimingNormal",
    "KaimingUniform",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
]

Initializer = Callable[[torch.Tensor], Any]
"""Fills a tensor in place."""


@dataclass(frozen=True)
class Constant:
    """`paddle.nn.initializer.Constant`: one value.

    >>> x = torch.empty(2)
    >>> Constant(3.0)(x)
    >>> x
    tensor([3., 3.])
    """

    value: float = 0.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        init.constant_(tensor, self.value)


@dataclass(frozen=True)
class Assign:
    """`paddle.nn.initializer.Assign`: given values."""

    value: Any

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        with torch.no_grad():
            tensor.copy_(torch.as_tensor(self.value))


@dataclass(frozen=True)
class Normal:
    """`paddle.nn.initializer.Normal`: a normal distribution."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        init.normal_(tensor, self.mean, self.std)


@dataclass(frozen=True)
class TruncatedNormal:
    """`paddle.nn.initializer.TruncatedNormal`: a normal distribution between two bounds.

    As in Paddle the bounds are numbers of standard deviations.
    """

    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        low, high = self.mean + self.a * self.std, self.mean + self.b * self.std
        init.trunc_normal_(tensor, self.mean, self.std, low, high)


@dataclass(frozen=True)
class Uniform:
    """`paddle.nn.initializer.Uniform`: a uniform distribution."""

    low: float = -1.0
    high: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        init.uniform_(tensor, self.low, self.high)


@dataclass(frozen=True)
class XavierUniform:
    """`paddle.nn.initializer.XavierUniform`: the default of weights.

    The fans are Paddle's: a linear weight has the shape (in, out).
    """

    fan_in: float | None = None
    fan_out: float | None = None
    gain: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        bound = self.gain * sqrt(6.0 / _fan_sum(tensor, self.fan_in, self.fan_out))
        init.uniform_(tensor, -bound, bound)


@dataclass(frozen=True)
class XavierNormal:
    """`paddle.nn.initializer.XavierNormal`."""

    fan_in: float | None = None
    fan_out: float | None = None
    gain: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        init.normal_(
            tensor, 0.0, self.gain * sqrt(2.0 / _fan_sum(tensor, self.fan_in, self.fan_out))
        )


@dataclass(frozen=True)
class KaimingUniform:
    """`paddle.nn.initializer.KaimingUniform`."""

    fan_in: float | None = None
    negative_slope: float = 0.0
    nonlinearity: Any = "relu"

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        bound = sqrt(3.0) * _kaiming_std(self, tensor)
        init.uniform_(tensor, -bound, bound)


@dataclass(frozen=True)
class KaimingNormal:
    """`paddle.nn.initializer.KaimingNormal`."""

    fan_in: float | None = None
    negative_slope: float = 0.0
    nonlinearity: Any = "relu"

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill a tensor in place."""
        init.normal_(tensor, 0.0, _kaiming_std(self, tensor))


@dataclass(frozen=True)
class ParamAttr:
    """`paddle.ParamAttr`: how a parameter is made, and trained by the optimizers of the dialect."""

    name: str | None = None
    initializer: Initializer | None = None
    learning_rate: float = 1.0
    regularizer: Any = None
    trainable: bool = True
    do_model_average: bool = True
    need_clip: bool = True

    def __post_init__(self) -> None:
        if not self.need_clip:
            raise ValueError(
                "ParamAttr(need_clip=False) is not supported: the optimizer's grad_clip clips all"
                " of its parameters. Give the parameter an optimizer of its own."
            )


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return the fan in and out of a weight: (in, out), or (out, in, *kernel) of a convolution."""
    if len(shape) < 2:
        return (shape[0], shape[0]) if shape else (1, 1)
    field = prod(shape[2:])
    return (shape[0], shape[1]) if len(shape) == 2 else (shape[1] * field, shape[0] * field)


def _fan_sum(tensor: torch.Tensor, fan_in: float | None, fan_out: float | None) -> float:
    computed_in, computed_out = _fans(tensor.shape)
    return (fan_in or computed_in) + (fan_out or computed_out)


def _kaiming_std(initializer: KaimingUniform | KaimingNormal, tensor: torch.Tensor) -> float:
    gain = init.calculate_gain(initializer.nonlinearity, initializer.negative_slope)
    return gain / sqrt(initializer.fan_in or _fans(tensor.shape)[0])


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
