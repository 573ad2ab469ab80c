"""Layers of `paddle.nn`: subclasses of torch's, with Paddle's arguments and defaults."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import torch
from torch import nn

from mezzo.compat.paddle._places import default_device
from mezzo.compat.paddle.nn import functional as F
from mezzo.compat.paddle.nn._layer import Layer
from mezzo.compat.paddle.nn.initializer import Constant, Normal

Attr = Any
"""A `ParamAttr`, an initializer, None for the default, or False for no parameter."""

_META = torch.device("meta")
"""Where torch's constructors put parameters that are replaced."""


class Linear(nn.Linear, Layer):
    """`paddle.nn.Linear`: `x @ weight + bias`, with a weight of shape (in, out).

    The weight starts Xavier-uniform and the bias zero.

    >>> Linear(4, 2).weight.shape
    [4, 2]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, device=_META)
        self.weight = self.create_parameter([in_features, out_features], weight_attr)
        self.bias = self.create_parameter([out_features], bias_attr, is_bias=True)

    def forward(self, input: Any) -> Any:
        """Return the product and the bias."""
        return F.linear(input, self.weight, self.bias)


class _ConvArguments:
    """Arguments and initial values of Paddle's convolutions, in front of torch's class.

    The weight starts normal, with the deviation `sqrt(2 / fan_in)`, and the bias zero.
    """

    _data_format: str

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        padding_mode: Any = "zeros",
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        data_format: str | None = None,
    ) -> None:
        F.check_channels_first(data_format or self._data_format, self._data_format)
        super().__init__(  # type: ignore[call-arg]
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding.lower() if isinstance(padding, str) else padding,
            dilation,
            groups,
            padding_mode=padding_mode,
            device=_META,
        )
        layer: Any = self
        std = sqrt(2.0 / (prod(layer.kernel_size) * in_channels))
        layer.weight = layer.create_parameter(
            layer.weight.shape, weight_attr, default_initializer=Normal(0.0, std)
        )
        layer.bias = layer.create_parameter([out_channels], bias_attr, is_bias=True)


class Conv1D(_ConvArguments, nn.Conv1d, Layer):
    """`paddle.nn.Conv1D`: convolve sequences with channels first."""

    _data_format = "NCL"


class Conv2D(_ConvArguments, nn.Conv2d, Layer):
    """`paddle.nn.Conv2D`: convolve images with channels first.

    >>> Conv2D(3, 8, 3).weight.shape
    [8, 3, 3, 3]
    """

    _data_format = "NCHW"


class Conv3D(_ConvArguments, nn.Conv3d, Layer):
    """`paddle.nn.Conv3D`: convolve volumes with channels first."""

    _data_format = "NCDHW"


class Conv2DTranspose(nn.ConvTranspose2d, Layer):
    """`paddle.nn.Conv2DTranspose`: convolve images with channels first, transposed."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        data_format: str = "NCHW",
    ) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            dilation=dilation,
            device=_META,
        )
        self.weight = self.create_parameter(self.weight.shape, weight_attr)
        self.bias = self.create_parameter([out_channels], bias_attr, is_bias=True)


class Embedding(nn.Embedding, Layer):
    """`paddle.nn.Embedding`: rows of a weight, which starts Xavier-uniform."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sparse: bool = False,
        weight_attr: Attr = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse=sparse, device=_META)
        self.weight = self.create_parameter([num_embeddings, embedding_dim], weight_attr)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()


# -- norms -----------------------------------------------------------------------------------------


class _BatchNormArguments:
    """Arguments and state of Paddle's batch norms, in front of torch's class."""

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        data_format: str = "NCHW",
        use_global_stats: bool | None = None,
        name: str | None = None,
    ) -> None:
        if data_format not in ("NC", "NCL", "NCHW", "NCDHW"):
            F.check_channels_first(data_format, "NCHW")
        if use_global_stats:
            raise ValueError(
                "use_global_stats=True is not supported. Call eval() on the layer, and freeze its"
                " parameters with stop_gradient = True."
            )
        # torch's momentum is the share of the new batch, Paddle's that of the average so far.
        options: dict[str, Any] = {"eps": epsilon, "momentum": 1.0 - momentum}
        super().__init__(num_features, device=default_device(), **options)  # type: ignore[call-arg]
        self.weight = self._create("weight", weight_attr, Constant(1.0))
        self.bias = self._create("bias", bias_attr, Constant(0.0))

    def _create(self, name: str, attr: Attr, default: Constant) -> Any:
        shape = getattr(self, name).shape
        return Layer.create_parameter(
            self,  # type: ignore[arg-type]
            shape,
            attr,
            is_bias=name == "bias",
            default_initializer=default,
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Accept Paddle's names of the statistics too."""
        for paddle_name, name in (("_mean", "running_mean"), ("_variance", "running_var")):
            if prefix + paddle_name in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + paddle_name)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class BatchNorm1D(_BatchNormArguments, nn.BatchNorm1d, Layer):
    """`paddle.nn.BatchNorm1D`. `momentum` is the share of the average so far: 1 minus torch's."""


class BatchNorm2D(_BatchNormArguments, nn.BatchNorm2d, Layer):
    """`paddle.nn.BatchNorm2D`. `momentum` is the share of the average so far: 1 minus torch's.

    >>> BatchNorm2D(3).momentum
    0.09999999999999998
    """


class BatchNorm3D(_BatchNormArguments, nn.BatchNorm3d, Layer):
    """`paddle.nn.BatchNorm3D`. `momentum` is the share of the average so far: 1 minus torch's."""


class BatchNorm(_BatchNormArguments, nn.BatchNorm2d, Layer):
    """`paddle.nn.BatchNorm`: for inputs of any number of axes, with an optional activation."""

    def __init__(
        self,
        num_channels: int,
        act: str | None = None,
        is_test: bool = False,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        param_attr: Attr = None,
        bias_attr: Attr = None,
        dtype: str = "float32",
        data_layout: str = "NCHW",
        use_global_stats: bool = False,
    ) -> None:
        super().__init__(
            num_channels, momentum, epsilon, param_attr, bias_attr, data_layout, use_global_stats
        )
        self._activation = None if act is None else getattr(F, act)
        self.train(not is_test)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accept any number of axes."""

    def forward(self, input: Any) -> Any:
        """Normalize, then apply the activation."""
        output = super().forward(input)
        return output if self._activation is None else self._activation(output)


class SyncBatchNorm(_BatchNormArguments, nn.SyncBatchNorm, Layer):
    """`paddle.nn.SyncBatchNorm`: statistics of all processes, or of this one without a group."""


class InstanceNorm2D(nn.InstanceNorm2d, Layer):
    """`paddle.nn.InstanceNorm2D`; in Paddle's checkpoints its weight is `scale`."""

    def __init__(
        self,
        num_features: int,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(num_features, epsilon, affine=True, device=_META)
        self.weight = self.create_parameter(
            [num_features], weight_attr, default_initializer=Constant(1.0)
        )
        self.bias = self.create_parameter([num_features], bias_attr, is_bias=True)


class LayerNorm(nn.LayerNorm, Layer):
    """`paddle.nn.LayerNorm`."""

    def __init__(
        self,
        normalized_shape: Any,
        epsilon: float = 1e-5,
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        name: str | None = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, epsilon, device=_META)
        self.weight = self.create_parameter(shape, weight_attr, default_initializer=Constant(1.0))
        self.bias = self.create_parameter(shape, bias_attr, is_bias=True)


class GroupNorm(nn.GroupNorm, Layer):
    """`paddle.nn.GroupNorm`."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        epsilon: float = 1e-5,
        weight_attr: Attr = None,
        bias_attr: Attr = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(num_groups, num_channels, epsilon, device=_META)
        self.weight = self.create_parameter(
            [num_channels], weight_attr, default_initializer=Constant(1.0)
        )
        self.bias = self.create_parameter([num_channels], bias_attr, is_bias=True)


# -- shapes and pools ------------------------------------------------------------------------------


class Flatten(nn.Flatten, Layer):
    """`paddle.nn.Flatten`."""

    def __init__(self, start_axis: int = 1, stop_axis: int = -1) -> None:
        super().__init__(start_axis, stop_axis)


class Identity(nn.Identity, Layer):
    """`paddle.nn.Identity`."""


class Dropout(nn.Dropout, Layer):
    """`paddle.nn.Dropout`."""

    def __init__(
        self,
        p: float = 0.5,
        axis: Any = None,
        mode: str = "upscale_in_train",
        name: str | None = None,
    ) -> None:
        F.check_dropout(axis, mode)
        super().__init__(p)
        self._mode = mode

    def forward(self, input: Any) -> Any:
        """Return the input with elements zeroed while training."""
        return F.dropout(input, self.p, training=self.training, mode=self._mode)


class Dropout2D(nn.Dropout2d, Layer):
    """`paddle.nn.Dropout2D`: zeroes whole channels."""

    def __init__(self, p: float = 0.5, data_format: str = "NCHW", name: str | None = None) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(p)


class Upsample(Layer):
    """`paddle.nn.Upsample`: see `nn.functional.interpolate`."""

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool = False,
        align_mode: int = 0,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._arguments = size, scale_factor, mode, align_corners, align_mode, data_format

    def forward(self, x: Any) -> Any:
        """Return the input in another size."""
        return F.interpolate(x, *self._arguments)


class MaxPool2D(nn.MaxPool2d, Layer):
    """`paddle.nn.MaxPool2D`."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        return_mask: bool = False,
        ceil_mode: bool = False,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(
            kernel_size, stride, padding, return_indices=return_mask, ceil_mode=ceil_mode
        )


class AvgPool2D(nn.AvgPool2d, Layer):
    """`paddle.nn.AvgPool2D`; `exclusive` leaves the padding out of the mean."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        exclusive: bool = True,
        divisor_override: int | None = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(kernel_size, stride, padding, ceil_mode, not exclusive, divisor_override)


class AdaptiveAvgPool2D(nn.AdaptiveAvgPool2d, Layer):
    """`paddle.nn.AdaptiveAvgPool2D`."""

    def __init__(
        self, output_size: Any, data_format: str = "NCHW", name: str | None = None
    ) -> None:
        F.check_channels_first(data_format, "NCHW")
        super().__init__(output_size)


class AdaptiveMaxPool2D(nn.AdaptiveMaxPool2d, Layer):
    """`paddle.nn.AdaptiveMaxPool2D`."""

    def __init__(
        self, output_size: Any, return_mask: bool = False, name: str | None = None
    ) -> None:
        super().__init__(output_size, return_mask)
