"""`gluon.nn`: containers, layers, activations and pooling as torch modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mezzo._errors import UnsupportedError
from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet import _ops, autograd, nd
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet.gluon._layers import (
    BatchNorm,
    Conv1D,
    Conv2D,
    Conv2DTranspose,
    Conv3D,
    Dense,
    Embedding,
    LayerNorm,
    Size,
    check_layout,
)
from mezzo.compat.mxnet.gluon.block import Block, HybridBlock, Layer

__all__ = [
    "ELU",
    "GELU",
    "Activation",
    "AvgPool2D",
    "BatchNorm",
    "Block",
    "Conv1D",
    "Conv2D",
    "Conv2DTranspose",
    "Conv3D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2D",
    "GlobalMaxPool2D",
    "HybridBlock",
    "HybridLambda",
    "HybridSequential",
    "Lambda",
    "LayerNorm",
    "LeakyReLU",
    "MaxPool2D",
    "Sequential",
]

Tensor = torch.Tensor

# -- containers ------------------------------------------------------------------------------------


class Sequential(Block, nn.Sequential):
    """`gluon.nn.Sequential`: blocks that run one after the other.

    >>> net = Sequential()
    >>> net.add(Dense(4, activation="relu"), Dense(2))
    >>> net.initialize()
    >>> net(torch.ones(3, 5)).shape
    torch.Size([3, 2])
    """

    def add(self, *blocks: nn.Module) -> None:
        """Add blocks at the end."""
        for block in blocks:
            self.append(block)

    def __getitem__(self, index: Any) -> Any:
        """Return a block, or for a slice a network of these blocks."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = type(self)()
        part.add(*list(self)[index])
        return part


class HybridSequential(Sequential, HybridBlock):
    """`gluon.nn.HybridSequential`; the same as `Sequential`."""

    forward = nn.Sequential.forward


class Lambda(Block):
    """Call a function, or an operator of `mxnet.nd` by name."""

    def __init__(self, function: str | Callable[..., Any], prefix: str | None = None) -> None:
        super().__init__(prefix)
        self.function = getattr(nd, function) if isinstance(function, str) else function

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)


class HybridLambda(Lambda):
    """Call a function with `F`, which is `mxnet.nd`, or an operator by name."""

    def __init__(self, function: str | Callable[..., Any], prefix: str | None = None) -> None:
        super().__init__(function, prefix)
        self._takes_module = not isinstance(function, str)

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(nd, *args) if self._takes_module else self.function(*args)


# -- layers without parameters --------------------------------------------------------------------


class Dropout(Layer, nn.Dropout):
    """`gluon.nn.Dropout`: drops inside `autograd.record()`."""

    def __init__(
        self, rate: float, axes: tuple[int, ...] = (), prefix: str | None = None, params: Any = None
    ) -> None:
        if axes:
            raise UnsupportedError(f"Dropout(axes={axes}) is not supported. Use axes=().")
        nn.Dropout.__init__(self, rate)
        self.prefix = prefix or ""

    def forward(self, data: Tensor) -> Tensor:
        """Drop elements in training mode."""
        return functional.dropout(data, self.p, self.training and autograd.is_training())


class Activation(Layer):
    """`gluon.nn.Activation`: relu, sigmoid, tanh, softrelu or softsign."""

    def __init__(self, activation: str, prefix: str | None = None, params: Any = None) -> None:
        super().__init__(prefix)
        _ops.Activation(torch.empty(0), activation)  # raises for an unknown name
        self.activation = activation

    def forward(self, data: Tensor) -> Tensor:
        """Apply the function."""
        return _ops.Activation(data, self.activation)

    def extra_repr(self) -> str:
        """Return the name of the function."""
        return self.activation


class LeakyReLU(Layer, nn.LeakyReLU):
    """`gluon.nn.LeakyReLU` with slope `alpha`."""

    def __init__(self, alpha: float, prefix: str | None = None, params: Any = None) -> None:
        nn.LeakyReLU.__init__(self, alpha)
        self.prefix = prefix or ""

    forward = nn.LeakyReLU.forward


class ELU(Layer, nn.ELU):
    """`gluon.nn.ELU`."""

    def __init__(self, alpha: float = 1.0, prefix: str | None = None, params: Any = None) -> None:
        nn.ELU.__init__(self, alpha)
        self.prefix = prefix or ""

    forward = nn.ELU.forward


class GELU(Layer, nn.GELU):
    """`gluon.nn.GELU`."""

    def __init__(self, prefix: str | None = None, params: Any = None) -> None:
        nn.GELU.__init__(self)
        self.prefix = prefix or ""

    forward = nn.GELU.forward


class Flatten(Layer, nn.Flatten):
    """`gluon.nn.Flatten`: joins all dimensions but the first."""

    def __init__(self, prefix: str | None = None, params: Any = None) -> None:
        nn.Flatten.__init__(self)
        self.prefix = prefix or ""

    forward = nn.Flatten.forward


class MaxPool2D(Layer, nn.MaxPool2d):
    """`gluon.nn.MaxPool2D`; `strides` defaults to `pool_size`."""

    def __init__(
        self,
        pool_size: Size = (2, 2),
        strides: Size | None = None,
        padding: Size = 0,
        layout: str = "NCHW",
        ceil_mode: bool = False,
        prefix: str | None = None,
        params: Any = None,
    ) -> None:
        check_layout(layout)
        nn.MaxPool2d.__init__(self, pool_size, strides, padding, ceil_mode=ceil_mode)
        self.prefix = prefix or ""

    forward = nn.MaxPool2d.forward


class AvgPool2D(Layer, nn.AvgPool2d):
    """`gluon.nn.AvgPool2D`; `strides` defaults to `pool_size`."""

    def __init__(
        self,
        pool_size: Size = (2, 2),
        strides: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        layout: str = "NCHW",
        count_include_pad: bool = True,
        prefix: str | None = None,
        params: Any = None,
    ) -> None:
        check_layout(layout)
        arguments: Any = (pool_size, strides, padding, ceil_mode, count_include_pad)
        nn.AvgPool2d.__init__(self, *arguments)
        self.prefix = prefix or ""

    forward = nn.AvgPool2d.forward


class GlobalAvgPool2D(Layer, nn.AdaptiveAvgPool2d):
    """`gluon.nn.GlobalAvgPool2D`: the average of each channel, of shape (N, C, 1, 1)."""

    def __init__(self, layout: str = "NCHW", prefix: str | None = None, params: Any = None) -> None:
        check_layout(layout)
        nn.AdaptiveAvgPool2d.__init__(self, 1)
        self.prefix = prefix or ""

    forward = nn.AdaptiveAvgPool2d.forward


class GlobalMaxPool2D(Layer, nn.AdaptiveMaxPool2d):
    """`gluon.nn.GlobalMaxPool2D`: the maximum of each channel, of shape (N, C, 1, 1)."""

    def __init__(self, layout: str = "NCHW", prefix: str | None = None, params: Any = None) -> None:
        check_layout(layout)
        nn.AdaptiveMaxPool2d.__init__(self, 1)
        self.prefix = prefix or ""

    forward = nn.AdaptiveMaxPool2d.forward


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=nn)
