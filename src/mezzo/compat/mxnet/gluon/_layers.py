"""The layers of `gluon.nn` with parameters, with sizes inferred at the first call.

They are torch's lazy layers, which keep their class once the sizes are known.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from mezzo._errors import UnsupportedError
from mezzo.autocasting.arguments import policy_of
from mezzo.autocasting.regions import innermost_region, is_exporting
from mezzo.compat.mxnet import _ops, autograd
from mezzo.compat.mxnet._ndarray import as_tensor
from mezzo.compat.mxnet.gluon.block import Layer

Tensor = torch.Tensor
Size = int | tuple[int, ...]

# -- linear layers and convolutions ----------------------------------------------------------------


class Dense(Layer, nn.LazyLinear):
    """`gluon.nn.Dense`: a linear layer; `flatten` joins all dimensions but the first before it."""

    cls_to_become = None  # type: ignore[assignment]

    def __init__(
        self,
        units: int,
        activation: str | None = None,
        use_bias: bool = True,
        flatten: bool = True,
        dtype: Any = "float32",
        weight_initializer: Any = None,
        bias_initializer: Any = "zeros",
        in_units: int = 0,
        prefix: str | None = None,
        params: Any = None,
    ) -> None:
        with _quiet():
            nn.LazyLinear.__init__(self, units, use_bias)
        self.prefix = prefix or ""
        self.activation, self.flatten = activation, flatten
        self.own_inits = {"weight": weight_initializer, "bias": bias_initializer}
        if in_units:
            self.initialize_parameters(torch.empty(1, in_units, device="meta"))

    def initialize_parameters(self, data: Tensor) -> None:
        """Infer `in_units` from the first input."""
        nn.LazyLinear.initialize_parameters(self, data.flatten(1) if self.flatten else data)

    def forward(self, data: Tensor) -> Tensor:
        """Apply the layer."""
        data = data.flatten(1) if self.flatten else data
        return _activate(functional.linear(data, self.weight, self.bias), self.activation)


class _Conv(Layer):
    """The arguments that gluon's convolutions share."""

    cls_to_become = None
    _torch_layer: type[Any]
    _dimensions: int
    initialize_parameters: Any

    def __init__(
        self,
        channels: int,
        kernel_size: Size,
        strides: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        layout: str = "NCHW",
        in_channels: int = 0,
        activation: str | None = None,
        use_bias: bool = True,
        weight_initializer: Any = None,
        bias_initializer: Any = "zeros",
        prefix: str | None = None,
        params: Any = None,
        output_padding: Size | None = None,
    ) -> None:
        check_layout(layout)
        arguments = {"output_padding": output_padding} if output_padding else {}
        construct: Any = type(self)._torch_layer.__init__
        with _quiet():
            construct(
                self,
                channels,
                kernel_size,
                strides,
                padding,
                dilation=dilation,
                groups=groups,
                bias=use_bias,
                **arguments,
            )
        self.prefix, self.activation = prefix or "", activation
        self.own_inits = {"weight": weight_initializer, "bias": bias_initializer}
        if in_channels:
            shape = (1, in_channels, *([1] * self._dimensions))
            self.initialize_parameters(torch.empty(shape, device="meta"))

    def forward(self, data: Tensor) -> Tensor:
        """Apply the convolution and the activation."""
        return _activate(type(self)._torch_layer.forward(self, data), self.activation)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the convolution: float16 on a CPU by rounding inputs and result.

        oneDNN's float16 backward takes 10 to 100 times as long as that of float32, so that an SSD
        of 64 pixels trains 6 times as fast.
        """
        convolve: Any = type(self)._torch_layer._conv_forward
        if not _computes_in_float16_on_cpu(input):
            result: Tensor = convolve(self, input, weight, bias)
            return result
        rounded = [
            None if tensor is None else tensor.half().float() for tensor in (input, weight, bias)
        ]
        with torch.autocast("cpu", enabled=False):
            result = convolve(self, *rounded)
        return result.half()


def _computes_in_float16_on_cpu(data: Tensor) -> bool:
    if data.device.type != "cpu" or is_dynamo_compiling() or is_exporting():
        return False
    region = innermost_region("cpu")
    policy = policy_of(region) if region is not None and region.enabled else None
    if policy is None or not torch.is_autocast_enabled("cpu"):
        return as_tensor(data).dtype is torch.float16
    return policy.explain("conv2d", as_tensor(data).dtype, device="cpu").dtype is torch.float16


class Conv1D(_Conv, nn.LazyConv1d):  # type: ignore[misc]
    """`gluon.nn.Conv1D`, for data of layout NCW."""

    _torch_layer, _dimensions = nn.LazyConv1d, 1
    forward = _Conv.forward  # type: ignore[assignment]


class Conv2D(_Conv, nn.LazyConv2d):  # type: ignore[misc]
    """`gluon.nn.Conv2D`, for data of layout NCHW; `in_channels` is inferred if it is 0.

    >>> layer = Conv2D(8, kernel_size=3, padding=1, activation="relu")
    >>> layer(torch.ones(1, 3, 4, 4)).shape
    torch.Size([1, 8, 4, 4])
    """

    _torch_layer, _dimensions = nn.LazyConv2d, 2
    forward = _Conv.forward  # type: ignore[assignment]


class Conv3D(_Conv, nn.LazyConv3d):  # type: ignore[misc]
    """`gluon.nn.Conv3D`, for data of layout NCDHW."""

    _torch_layer, _dimensions = nn.LazyConv3d, 3
    forward = _Conv.forward  # type: ignore[assignment]


class Conv2DTranspose(_Conv, nn.LazyConvTranspose2d):  # type: ignore[misc]
    """`gluon.nn.Conv2DTranspose`, for data of layout NCHW."""

    _torch_layer, _dimensions = nn.LazyConvTranspose2d, 2
    forward = _Conv.forward  # type: ignore[assignment]


# -- normalization ---------------------------------------------------------------------------------


class BatchNorm(Layer, nn.LazyBatchNorm2d, nn.BatchNorm2d):
    """`gluon.nn.BatchNorm` of any number of dimensions, with the channels on axis 1.

    `momentum` is the share that the running statistics keep: 0.9 is torch's 0.1. Differs from
    MXNet: the running variance is that of torch, with n - 1.
    """

    cls_to_become = None  # type: ignore[assignment]

    def __init__(
        self,
        axis: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        in_channels: int = 0,
        prefix: str | None = None,
        params: Any = None,
        **kwargs: Any,
    ) -> None:
        if axis != 1:
            raise UnsupportedError(
                f"BatchNorm(axis={axis}) is not supported. Put the channels on axis 1, layout NCHW."
            )
        with _quiet():
            nn.LazyBatchNorm2d.__init__(self, eps=epsilon, momentum=1 - momentum)
        self.prefix, self.use_global_stats = prefix or "", use_global_stats
        self.own_inits = {
            "gamma": gamma_initializer,
            "beta": beta_initializer,
            "running_mean": running_mean_initializer,
            "running_var": running_variance_initializer,
        }
        self.weight.requires_grad, self.bias.requires_grad = scale, center
        if in_channels:
            self.initialize_parameters(torch.empty(1, in_channels, device="meta"))

    def forward(self, data: Tensor) -> Tensor:
        """Normalize, in training mode by the batch's statistics."""
        training = self.training and autograd.is_training() and not self.use_global_stats
        mean: Any = self.running_mean
        variance: Any = self.running_var
        if training and data.numel() == data.shape[1]:
            # torch refuses one value per channel; MXNet returns beta, as when SSD makes anchors.
            training, data = False, data - data
            mean, variance = torch.zeros_like(mean), torch.ones_like(variance)
        return functional.batch_norm(
            data,
            mean,
            variance,
            self.weight,
            self.bias,
            training,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )


class LayerNorm(Layer, LazyModuleMixin, nn.LayerNorm):
    """`gluon.nn.LayerNorm` over the last axis; `in_channels` is inferred if it is 0."""

    def __init__(
        self,
        axis: int = -1,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        in_channels: int = 0,
        prefix: str | None = None,
        params: Any = None,
    ) -> None:
        if axis != -1:
            raise UnsupportedError(
                f"LayerNorm(axis={axis}) is not supported. Transpose the data and use axis=-1."
            )
        with _quiet():
            LazyModuleMixin.__init__(self, 0, epsilon)
        self.prefix = prefix or ""
        self.own_inits = {"gamma": gamma_initializer, "beta": beta_initializer}
        self.weight: Any = UninitializedParameter(requires_grad=scale)
        self.bias: Any = UninitializedParameter(requires_grad=center)
        if in_channels:
            self.initialize_parameters(torch.empty(1, in_channels, device="meta"))

    def initialize_parameters(self, data: Tensor) -> None:
        """Infer `in_channels` from the first input."""
        self.normalized_shape = tuple(data.shape[-1:])
        if self.has_uninitialized_params():
            for parameter in (self.weight, self.bias):
                parameter.materialize(self.normalized_shape)
            self.reset_parameters()

    forward = nn.LayerNorm.forward


class Embedding(Layer, nn.Embedding):
    """`gluon.nn.Embedding`: rows of a table; indices may be floats."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        dtype: Any = "float32",
        weight_initializer: Any = None,
        sparse_grad: bool = False,
        prefix: str | None = None,
        params: Any = None,
    ) -> None:
        nn.Embedding.__init__(self, input_dim, output_dim, sparse=sparse_grad)
        self.prefix, self.own_inits = prefix or "", {"weight": weight_initializer}
        self.reset_parameters()

    def forward(self, data: Tensor) -> Tensor:
        """Return the rows of these indices."""
        return nn.Embedding.forward(self, data.long())


def _activate(data: Tensor, name: str | None) -> Tensor:
    return data if name is None else _ops.Activation(data, name)


def check_layout(layout: str) -> None:
    if not layout.startswith("NC"):
        raise UnsupportedError(
            f"layout={layout!r} is not supported. Use NCHW, and mezzo.channels_last(net) for"
            " channels-last memory."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning of some versions of torch that lazy modules may change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        yield
