"""MXNet's layers in torch: convolutions, normalization, activations, output layers.

A parameter that is stored in another dtype than the data is cast, as MXNet's type inference would
have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo.compat.mxnet.symbol._ops import ParameterShapes, Shape, register

_LAYOUTS = (None, "NCW", "NCHW", "NCDHW")
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _along_channels(values: Tensor, data: Tensor, axis: int = 1) -> Tensor:
    """Return values of each channel in a shape that broadcasts over the data."""
    shape = [1] * data.dim()
    shape[axis] = -1
    return cast(values, data.dtype).reshape(shape)


def _convolution_shapes(attributes: Mapping[str, Any]) -> ParameterShapes:
    filters = attributes["num_filter"]
    return {"weight": (filters, None, *attributes["kernel"]), "bias": (filters,)}


def _deconvolution_shapes(attributes: Mapping[str, Any]) -> ParameterShapes:
    filters = attributes["num_filter"]
    each = filters // attributes["num_group"]
    return {"weight": (None, each, *attributes["kernel"]), "bias": (filters,)}


def _linear_shapes(attributes: Mapping[str, Any]) -> ParameterShapes:
    return {"weight": (attributes["num_hidden"], None), "bias": (attributes["num_hidden"],)}


def _embedding_shapes(attributes: Mapping[str, Any]) -> ParameterShapes:
    return {"weight": (attributes["input_dim"], attributes["output_dim"])}


@register("Convolution Convolution_v1", allowed={"layout": _LAYOUTS}, shapes=_convolution_shapes)
def _convolution(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kernel: Shape,
    num_filter: int,
    stride: Shape = (),
    dilate: Shape = (),
    pad: Shape = (),
    num_group: int = 1,
    no_bias: bool = False,
) -> Tensor:
    return _CONVOLUTIONS[len(kernel)](
        data,
        cast(weight, data.dtype),
        None if no_bias or bias is None else cast(bias, data.dtype),
        stride or 1,
        pad or 0,
        dilate or 1,
        num_group,
    )


@register("Deconvolution", allowed={"layout": _LAYOUTS}, shapes=_deconvolution_shapes)
def _deconvolution(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kernel: Shape,
    num_filter: int,
    stride: Shape = (),
    dilate: Shape = (),
    pad: Shape = (),
    adj: Shape = (),
    target_shape: Shape = (),
    num_group: int = 1,
    no_bias: bool = True,
) -> Tensor:
    stride, dilate = (values or (1,) * len(kernel) for values in (stride, dilate))
    if any(target_shape):
        # The padding that gives the requested size; the right side has one less where it is odd.
        excess = [
            s * (size - 1) + d * (k - 1) + 1 - target
            for s, size, d, k, target in zip(
                stride, data.shape[2:], dilate, kernel, target_shape, strict=True
            )
        ]
        pad, adj = tuple((e + 1) // 2 for e in excess), tuple(e % 2 for e in excess)
    return _TRANSPOSED[len(kernel)](
        data,
        cast(weight, data.dtype),
        None if no_bias or bias is None else cast(bias, data.dtype),
        stride,
        pad or 0,
        adj or 0,
        num_group,
        dilate,
    )


@register("FullyConnected", shapes=_linear_shapes)
def _fully_connected(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_hidden: int,
    flatten: bool = True,
    no_bias: bool = False,
) -> Tensor:
    data = data.flatten(1) if flatten else data
    bias = None if no_bias or bias is None else cast(bias, data.dtype)
    return F.linear(data, cast(weight, data.dtype), bias)


@register("Embedding", ignored="dtype", float32="data", shapes=_embedding_shapes)
def _embedding(data: Tensor, weight: Tensor, *, input_dim: int, output_dim: int) -> Tensor:
    # Indices are numbers of any dtype, and out of range the nearest row is taken.
    return F.embedding(data.long().clamp(0, len(weight) - 1), weight)


@register(
    "BatchNorm BatchNorm_v1 CuDNNBatchNorm",
    allowed={"output_mean_var": (False,)},
    float32="gamma beta moving_mean moving_var",
)
def _batch_norm(
    data: Tensor,
    gamma: Tensor,
    beta: Tensor,
    moving_mean: Tensor,
    moving_var: Tensor,
    *,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    axis: int = 1,
    training: bool,
) -> Tensor:
    result = F.batch_norm(
        data.movedim(axis, 1),
        moving_mean,
        moving_var,
        torch.ones_like(gamma) if fix_gamma else gamma,
        beta,
        training and not use_global_stats,
        1 - momentum,
        eps,
    )
    return result.movedim(1, axis)


@register("InstanceNorm")
def _instance_norm(data: Tensor, gamma: Tensor, beta: Tensor, *, eps: float = 1e-3) -> Tensor:
    return F.instance_norm(
        data, weight=cast(gamma, data.dtype), bias=cast(beta, data.dtype), eps=eps
    )


@register("LayerNorm", allowed={"output_mean_var": (False,)})
def _layer_norm(
    data: Tensor, gamma: Tensor, beta: Tensor, *, axis: int = -1, eps: float = 1e-5
) -> Tensor:
    moved = data.movedim(axis, -1)
    weight, bias = cast(gamma, data.dtype), cast(beta, data.dtype)
    return F.layer_norm(moved, moved.shape[-1:], weight, bias, eps).movedim(-1, axis)


@register("GroupNorm", allowed={"output_mean_var": (False,)})
def _group_norm(
    data: Tensor, gamma: Tensor, beta: Tensor, *, num_groups: int = 1, eps: float = 1e-5
) -> Tensor:
    # MXNet 1 has a value of each group, MXNet 2 of each channel.
    weight, bias = (
        cast(values, data.dtype).repeat_interleave(data.shape[1] // len(values))
        for values in (gamma, beta)
    )
    return F.group_norm(data, num_groups, weight, bias, eps)


@register("LRN")
def _local_response_norm(
    data: Tensor,
    *,
    nsize: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    knorm: float = 2.0,
) -> Tensor:
    # Squares leave the range of float16, and torch has no such kernel for 16 bits on the CPU.
    wide = cast(data, torch.float32) if data.dtype in HALF_DTYPES else data
    return cast(F.local_response_norm(wide, nsize, alpha, beta, knorm), data.dtype)


@register("L2Normalization", allowed={"mode": ("instance", "channel", "spatial")})
def _l2_normalization(data: Tensor, *, eps: float = 1e-10, mode: str = "instance") -> Tensor:
    spatial = tuple(range(2, data.dim()))
    axes = {"instance": (1, *spatial), "channel": (1,), "spatial": spatial}[mode]
    return data / (data.square().sum(axes, keepdim=True) + eps).sqrt()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softrelu": F.softplus,
    "softsign": F.softsign,
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
}


@register("Activation", allowed={"act_type": tuple(_ACTIVATIONS)})
def _activation(data: Tensor, *, act_type: str) -> Tensor:
    return _ACTIVATIONS[act_type](data)


@register("LeakyReLU", allowed={"act_type": ("leaky", "elu", "prelu", "gelu", "selu", "rrelu")})
def _leaky_relu(
    data: Tensor,
    gamma: Tensor | None = None,
    *,
    act_type: str = "leaky",
    slope: float = 0.25,
    lower_bound: float = 0.125,
    upper_bound: float = 0.334,
) -> Tensor:
    match act_type:
        case "elu":
            return F.elu(data, slope)
        case "selu":
            return F.selu(data)
        case "gelu":
            return F.gelu(data)
        case "prelu" if gamma is not None:
            slopes = _along_channels(gamma.reshape(-1), data, min(1, data.dim() - 1))
            return torch.where(data > 0, data, data * slopes)
        case "rrelu":
            slope = (lower_bound + upper_bound) / 2
    return F.leaky_relu(data, slope)


@register("Dropout", ignored="axes")
def _dropout(data: Tensor, *, p: float = 0.5, mode: str = "training", training: bool) -> Tensor:
    return F.dropout(data, p, training or mode == "always")


# -- softmax and output layers: in inference the labels have no effect -----------------------------

_GRADIENT_ATTRIBUTES = (
    "grad_scale ignore_label use_ignore normalization out_grad smooth_alpha valid_thresh"
)


@register("SoftmaxOutput Softmax", ignored=_GRADIENT_ATTRIBUTES)
def _softmax_output(
    data: Tensor,
    label: Tensor | None = None,
    *,
    multi_output: bool = False,
    preserve_shape: bool = False,
) -> Tensor:
    if multi_output:
        return data.softmax(1)
    return data.softmax(-1) if preserve_shape else data.flatten(1).softmax(1).reshape(data.shape)


@register("LinearRegressionOutput", ignored=_GRADIENT_ATTRIBUTES)
def _regression_output(data: Tensor, label: Tensor | None = None) -> Tensor:
    return data


@register("MAERegressionOutput", ignored=_GRADIENT_ATTRIBUTES)
def _absolute_error_output(data: Tensor, label: Tensor | None = None) -> Tensor:
    return data


@register("LogisticRegressionOutput", ignored=_GRADIENT_ATTRIBUTES)
def _logistic_output(data: Tensor, label: Tensor | None = None) -> Tensor:
    return data.sigmoid()


@register("MakeLoss make_loss", ignored=_GRADIENT_ATTRIBUTES)
def _make_loss(data: Tensor) -> Tensor:
    return data


@register("softmax", allowed={"use_length": (False,)})
def _softmax(
    data: Tensor,
    *,
    axis: int = -1,
    temperature: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return (data / temperature if temperature else data).softmax(axis, dtype=dtype)


@register("log_softmax", allowed={"use_length": (False,)})
def _log_softmax(
    data: Tensor,
    *,
    axis: int = -1,
    temperature: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return (data / temperature if temperature else data).log_softmax(axis, dtype=dtype)


@register("SoftmaxActivation", allowed={"mode": ("instance", "channel")})
def _softmax_activation(data: Tensor, *, mode: str = "instance") -> Tensor:
    if mode == "channel":
        return data.softmax(1)
    return data.flatten(1).softmax(1).reshape(data.shape)
