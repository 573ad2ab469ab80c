"""`megengine.functional.nn`: layers, activations and losses with MegEngine's argument names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine.functional.loss import (
    binary_cross_entropy,
    cross_entropy,
    hinge_loss,
    l1_loss,
    square_loss,
)

__all__ = [
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "avg_pool2d",
    "binary_cross_entropy",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "hinge_loss",
    "hsigmoid",
    "hswish",
    "indexing_one_hot",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "logsigmoid",
    "logsoftmax",
    "logsumexp",
    "max_pool2d",
    "one_hot",
    "pixel_shuffle",
    "prelu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "square_loss",
]

relu, relu6, sigmoid = torch.relu, functional.relu6, torch.sigmoid
silu, gelu, softplus = functional.silu, functional.gelu, functional.softplus
logsigmoid, hswish, hsigmoid = functional.logsigmoid, functional.hardswish, functional.hardsigmoid
prelu, pixel_shuffle = functional.prelu, functional.pixel_shuffle

Size = Any
"""An int, or one for each dimension."""


def linear(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    compute_mode: str = "default",
) -> torch.Tensor:
    """Return `inp @ weight.T + bias`."""
    return functional.linear(inp, weight, bias)


def conv1d(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **kw: Any
) -> torch.Tensor:
    """`torch.nn.functional.conv1d`; see `conv2d`."""
    return functional.conv1d(inp, weight, _flat(bias), *args, **_without_modes(kw))


def conv2d(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **kw: Any
) -> torch.Tensor:
    """`torch.nn.functional.conv2d` that also accepts a bias of shape (1, C, 1, 1).

    `conv_mode` and `compute_mode` have no effect: sums are always float32.
    """
    return functional.conv2d(inp, weight, _flat(bias), *args, **_without_modes(kw))


def conv3d(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **kw: Any
) -> torch.Tensor:
    """`torch.nn.functional.conv3d`; see `conv2d`."""
    return functional.conv3d(inp, weight, _flat(bias), *args, **_without_modes(kw))


def conv_transpose2d(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    **modes: Any,
) -> torch.Tensor:
    """`torch.nn.functional.conv_transpose2d`; see `conv2d`."""
    return functional.conv_transpose2d(
        inp,
        weight,
        _flat(bias),
        stride,
        padding,
        output_padding,
        groups,
        dilation,
    )


def max_pool2d(
    inp: torch.Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0
) -> torch.Tensor:
    """Return the maximum of each window."""
    pooled: torch.Tensor = functional.max_pool2d(inp, kernel_size, stride, padding)
    return pooled


def avg_pool2d(
    inp: torch.Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    mode: str = "average_count_exclude_padding",
) -> torch.Tensor:
    """Return the mean of each window; padding counts only with mode "average"."""
    return functional.avg_pool2d(
        inp,
        kernel_size,
        stride,
        padding,
        count_include_pad=counts_padding(mode),
    )


def counts_padding(mode: str) -> bool:
    """Return whether a mode of average pooling counts padding."""
    modes = {"average_count_exclude_padding": False, "average": True}
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, got {mode!r}.")
    return modes[mode]


def adaptive_avg_pool2d(inp: torch.Tensor, oshp: Size) -> torch.Tensor:
    """Average over windows such that the result has the shape `oshp`."""
    return functional.adaptive_avg_pool2d(inp, oshp)


def adaptive_max_pool2d(inp: torch.Tensor, oshp: Size) -> torch.Tensor:
    """Maximum over windows such that the result has the shape `oshp`."""
    pooled: torch.Tensor = functional.adaptive_max_pool2d(inp, oshp)
    return pooled


def leaky_relu(inp: torch.Tensor, negative_slope: float = 0.01) -> torch.Tensor:
    """Return `inp`, and its negative elements times the slope."""
    return functional.leaky_relu(inp, negative_slope)


def softmax(inp: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Return the softmax; without an axis over axis 1, of 1 or 3 dimensions over axis 0.

    >>> softmax(torch.zeros(1, 2))
    tensor([[0.5000, 0.5000]])
    """
    return torch.softmax(inp, softmax_axis(inp.dim()) if axis is None else axis)


def softmax_axis(dimensions: int) -> int:
    """Return the axis of a softmax for which none was passed."""
    return 0 if dimensions in (0, 1, 3) else 1


def logsoftmax(inp: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the logarithm of the softmax over an axis."""
    return torch.log_softmax(inp, axis)


def logsumexp(inp: torch.Tensor, axis: int | Sequence[int], keepdims: bool = False) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials over axes."""
    return torch.logsumexp(inp, axis if isinstance(axis, int) else tuple(axis), keepdim=keepdims)


def layer_norm(
    inp: torch.Tensor,
    normalized_shape: Sequence[int],
    affine: bool,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalize over the last axes; `weight` and `bias` are used if `affine`."""
    used = (weight, bias) if affine else (None, None)
    return functional.layer_norm(inp, list(normalized_shape), *used, eps)


def dropout(inp: torch.Tensor, drop_prob: float, training: bool = True) -> torch.Tensor:
    """Set elements to 0 with a probability, and scale the others up."""
    return functional.dropout(inp, drop_prob, training)


def embedding(inp: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table at indices of any integer dtype."""
    return functional.embedding(inp.long(), weight)


def one_hot(inp: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return a new last axis with a 1 at the index, in the dtype of the indices."""
    return functional.one_hot(inp.long(), num_classes).to(inp.dtype)


def indexing_one_hot(
    src: torch.Tensor, index: torch.Tensor, axis: int = 1, keepdims: bool = False
) -> torch.Tensor:
    """Choose one element along an axis by its index."""
    chosen = src.gather(axis, index.long().unsqueeze(axis))
    return chosen if keepdims else chosen.squeeze(axis)


def _flat(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.reshape(-1)


def _without_modes(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("conv_mode", "compute_mode")
    }


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=functional)
