"""`paddle.nn.functional`: torch's functions with Paddle's arguments.

Each takes Paddle's tensors, torch's, and the variables of static programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._dtypes import parse_dtype
from mezzo.compat.paddle._regions import adds_in_float32
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import Tensor

__all__ = [
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "conv2d",
    "cross_entropy",
    "ctc_loss",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "interpolate",
    "kl_div",
    "l1_loss",
    "label_smooth",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "log_softmax",
    "max_pool2d",
    "mish",
    "mse_loss",
    "nll_loss",
    "normalize",
    "one_hot",
    "pad",
    "prelu",
    "relu",
    "relu6",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "softmax_with_cross_entropy",
    "softplus",
    "square_error_cost",
    "swish",
    "tanh",
    "upsample",
]

Tensors = Any
"""A tensor of Paddle or torch, or a variable of a static program."""


def linear(x: Tensors, weight: Tensors, bias: Tensors = None, name: str | None = None) -> Any:
    """Return `x @ weight + bias`; the weight has the shape (in, out), as in Paddle.

    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]))
    tensor([[1., 2., 4.]])
    """
    if type(x) not in _EAGER_TYPES and has_torch_function((x,)):
        # A variable of a static program records this call: the weight in it is the parameter
        # itself and not a view, which the optimizer would not update.
        return handle_torch_function(linear, (x,), x, weight, bias)
    if bias is not None and adds_in_float32():
        # In Paddle's guide this is a matmul and an elementwise_add, each with its own rule.
        return F.linear(x, weight.t()) + bias
    return F.linear(x, weight.t(), bias)


# The op whose rule `linear` follows, for code that looks at functions.
linear.__wrapped__ = F.linear  # type: ignore[attr-defined]
_EAGER_TYPES = (torch.Tensor, Tensor)


# -- activations -----------------------------------------------------------------------------------


def relu(x: Tensors, name: str | None = None) -> Any:
    """Return the positive part."""
    return F.relu(x)


def relu6(x: Tensors, name: str | None = None) -> Any:
    """Return the positive part, at most 6."""
    return F.relu6(x)


def leaky_relu(x: Tensors, negative_slope: float = 0.01, name: str | None = None) -> Any:
    """Return the positive part, plus the negative part times a slope."""
    return F.leaky_relu(x, negative_slope)


def gelu(x: Tensors, approximate: bool = False, name: str | None = None) -> Any:
    """Return the Gaussian error linear unit; `approximate=True` uses tanh."""
    return F.gelu(x, approximate="tanh" if approximate else "none")


def sigmoid(x: Tensors, name: str | None = None) -> Any:
    """Return the logistic function."""
    return torch.sigmoid(x)


def tanh(x: Tensors, name: str | None = None) -> Any:
    """Return the hyperbolic tangent."""
    return torch.tanh(x)


def silu(x: Tensors, name: str | None = None) -> Any:
    """Return `x * sigmoid(x)`."""
    return F.silu(x)


swish = silu


def elu(x: Tensors, alpha: float = 1.0, name: str | None = None) -> Any:
    """Return the exponential linear unit."""
    return F.elu(x, alpha)


def hardswish(x: Tensors, name: str | None = None) -> Any:
    """Return `x * relu6(x + 3) / 6`."""
    return F.hardswish(x)


def hardsigmoid(
    x: Tensors, slope: float = 0.1666667, offset: float = 0.5, name: str | None = None
) -> Any:
    """Return `x * slope + offset`, between 0 and 1."""
    if (slope, offset) == (0.1666667, 0.5):
        return F.hardsigmoid(x)
    return torch.clamp(x * slope + offset, 0.0, 1.0)


def mish(x: Tensors, name: str | None = None) -> Any:
    """Return `x * tanh(softplus(x))`."""
    return F.mish(x)


def prelu(x: Tensors, weight: Tensors, data_format: str = "NCHW", name: str | None = None) -> Any:
    """Return the positive part, plus the negative part times a weight."""
    check_channels_first(data_format, "NCHW")
    return F.prelu(x, weight)


def log_sigmoid(x: Tensors, name: str | None = None) -> Any:
    """Return the logarithm of the logistic function."""
    return F.logsigmoid(x)


def softplus(x: Tensors, beta: float = 1, threshold: float = 20, name: str | None = None) -> Any:
    """Return a smooth positive part."""
    return F.softplus(x, beta, threshold)


def softmax(x: Tensors, axis: int = -1, dtype: Any = None, name: str | None = None) -> Any:
    """Return the softmax along an axis, the last by default.

    >>> softmax(torch.zeros(2, 4)).sum().item()
    2.0
    """
    return F.softmax(x, dim=axis, **_dtype(dtype))


def log_softmax(x: Tensors, axis: int = -1, dtype: Any = None, name: str | None = None) -> Any:
    """Return the logarithm of the softmax along an axis, the last by default."""
    return F.log_softmax(x, dim=axis, **_dtype(dtype))


def dropout(
    x: Tensors,
    p: float = 0.5,
    axis: Any = None,
    training: bool = True,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> Any:
    """Zero elements with a probability; scale the others up, or all down for inference."""
    check_dropout(axis, mode)
    dropped = F.dropout(x, float(p), training)
    return dropped if mode == "upscale_in_train" else dropped * (1.0 - float(p))


def check_dropout(axis: Any, mode: str) -> None:
    """Raise for the forms of dropout that torch does not have."""
    if mode not in ("upscale_in_train", "downscale_in_infer"):
        raise ValueError(
            f"mode argument should be 'downscale_in_infer' or 'upscale_in_train', got {mode!r}."
        )
    if axis is not None:
        raise ValueError(
            f"dropout(axis={axis!r}) is not supported. For whole channels use"
            " torch.nn.functional.dropout2d."
        )


# -- layers ----------------------------------------------------------------------------------------


def conv2d(
    x: Tensors,
    weight: Tensors,
    bias: Tensors = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Return a convolution of images."""
    check_channels_first(data_format, "NCHW")
    padding = padding.lower() if isinstance(padding, str) else padding
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def max_pool2d(
    x: Tensors,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    return_mask: bool = False,
    ceil_mode: bool = False,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Return the largest value of each window; with `return_mask`, their indices too."""
    check_channels_first(data_format, "NCHW")
    pool: Any = F.max_pool2d
    return pool(x, kernel_size, stride, padding, ceil_mode=ceil_mode, return_indices=return_mask)


def avg_pool2d(
    x: Tensors,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    exclusive: bool = True,
    divisor_override: int | None = None,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Return the mean of each window; `exclusive` leaves the padding out of the mean."""
    check_channels_first(data_format, "NCHW")
    return F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, not exclusive, divisor_override)


def adaptive_avg_pool2d(
    x: Tensors, output_size: Any, data_format: str = "NCHW", name: str | None = None
) -> Any:
    """Return means of windows, as many as the output has elements."""
    check_channels_first(data_format, "NCHW")
    return F.adaptive_avg_pool2d(x, output_size)


def layer_norm(
    x: Tensors,
    normalized_shape: Any,
    weight: Tensors = None,
    bias: Tensors = None,
    epsilon: float = 1e-5,
    name: str | None = None,
) -> Any:
    """Normalize over the last axes."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return F.layer_norm(x, shape, weight, bias, epsilon)


def embedding(
    x: Tensors,
    weight: Tensors,
    padding_idx: int | None = None,
    sparse: bool = False,
    name: str | None = None,
) -> Any:
    """Return the rows of a weight."""
    return F.embedding(x, weight, padding_idx, sparse=sparse)


def one_hot(x: Tensors, num_classes: int, name: str | None = None) -> Any:
    """Return float32 rows with a one at each index."""
    return F.one_hot(x.long(), num_classes).float()


def label_smooth(
    label: Tensors, prior_dist: Tensors = None, epsilon: float = 0.1, name: str | None = None
) -> Any:
    """Return one-hot labels mixed with a distribution, which is uniform by default."""
    prior = 1.0 / label.shape[-1] if prior_dist is None else prior_dist
    return (1.0 - epsilon) * label + epsilon * prior


def normalize(
    x: Tensors, p: float = 2, axis: int = 1, epsilon: float = 1e-12, name: str | None = None
) -> Any:
    """Divide by the norm along an axis."""
    # Not torch's function: its norm is an op of the black list, and Paddle's `p_norm` is not.
    return x / torch.linalg.vector_norm(x, p, axis, keepdim=True).clamp_min(epsilon)


def interpolate(
    x: Tensors,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool = False,
    align_mode: int = 0,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Return images in another size."""
    check_channels_first(data_format, "NCHW")
    mode = mode.lower()
    interpolates = mode in ("linear", "bilinear", "bicubic", "trilinear")
    if align_mode != 0 and mode != "bicubic" and interpolates and not align_corners:
        raise ValueError(
            f"align_mode={align_mode!r} is not supported with mode={mode!r}. Use align_mode=0,"
            " Paddle's default, or align_corners=True."
        )
    sizes = size.tolist() if isinstance(size, torch.Tensor) else size
    if isinstance(sizes, list | tuple):
        sizes = [int(number) for number in sizes]
    return F.interpolate(
        x, sizes, scale_factor, mode, align_corners=align_corners if interpolates else None
    )


upsample = interpolate


def pad(
    x: Tensors,
    pad: Any,
    mode: str = "constant",
    value: float = 0.0,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Any:
    """Pad the last axes; the sizes start with the last axis, as in torch."""
    sizes = [int(size) for size in pad]
    if mode == "constant" and len(sizes) == 2 * x.dim():
        # With a pair for each axis Paddle starts with the first one.
        pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
        sizes = [size for pair in reversed(pairs) for size in pair]
    return F.pad(x, sizes, mode, value if mode == "constant" else None)


# -- losses ----------------------------------------------------------------------------------------


def mse_loss(
    input: Tensors, label: Tensors, reduction: str = "mean", name: str | None = None
) -> Any:
    """Return the squared error."""
    return F.mse_loss(input, label, reduction=reduction)


def l1_loss(
    input: Tensors, label: Tensors, reduction: str = "mean", name: str | None = None
) -> Any:
    """Return the absolute error."""
    return F.l1_loss(input, label, reduction=reduction)


def smooth_l1_loss(
    input: Tensors,
    label: Tensors,
    reduction: str = "mean",
    delta: float = 1.0,
    name: str | None = None,
) -> Any:
    """Return the Huber loss, which is what Paddle's function of this name computes."""
    return F.huber_loss(input, label, reduction=reduction, delta=delta)


def square_error_cost(input: Tensors, label: Tensors) -> Any:
    """Return the squared error of each element."""
    return F.mse_loss(input, label, reduction="none")


def binary_cross_entropy(
    input: Tensors,
    label: Tensors,
    weight: Tensors = None,
    reduction: str = "mean",
    name: str | None = None,
) -> Any:
    """Return the cross entropy of probabilities."""
    return F.binary_cross_entropy(input, label, weight, reduction=reduction)


def binary_cross_entropy_with_logits(
    logit: Tensors,
    label: Tensors,
    weight: Tensors = None,
    reduction: str = "mean",
    pos_weight: Tensors = None,
    name: str | None = None,
) -> Any:
    """Return the cross entropy of logits."""
    return F.binary_cross_entropy_with_logits(
        logit, label, weight, reduction=reduction, pos_weight=pos_weight
    )


def kl_div(
    input: Tensors,
    label: Tensors,
    reduction: str = "mean",
    log_target: bool = False,
    name: str | None = None,
) -> Any:
    """Return the Kullback-Leibler divergence of logarithms of probabilities."""
    return F.kl_div(input, label, reduction=reduction, log_target=log_target)


def ctc_loss(
    log_probs: Tensors,
    labels: Tensors,
    input_lengths: Tensors,
    label_lengths: Tensors,
    blank: int = 0,
    reduction: str = "mean",
    norm_by_times: bool = False,
) -> Any:
    """Return the CTC loss of logits: as in Paddle, the softmax is part of it."""
    if norm_by_times:
        raise ValueError("norm_by_times=True is not supported. Divide the loss by the lengths.")
    probabilities = F.log_softmax(log_probs, dim=-1)
    lengths = input_lengths.long(), label_lengths.long()
    return F.ctc_loss(probabilities, labels.long(), *lengths, blank=blank, reduction=reduction)


def nll_loss(
    input: Tensors,
    label: Tensors,
    weight: Tensors = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    name: str | None = None,
) -> Any:
    """Return the negative log likelihood; classes are on axis 1."""
    return F.nll_loss(input, label, weight, ignore_index=ignore_index, reduction=reduction)


def cross_entropy(
    input: Tensors,
    label: Tensors,
    weight: Tensors = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    soft_label: bool = False,
    axis: int = -1,
    use_softmax: bool = True,
    label_smoothing: float = 0.0,
    name: str | None = None,
) -> Any:
    """Return the cross entropy; classes are on the last axis unless `axis` is another.

    Labels are class numbers of shape (N,) or (N, 1), or with `soft_label=True` probabilities. The
    loss of bfloat16 logits is float32, as in Paddle.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([[1], [3]])).item()
    1.3862943649291992
    """
    has_class_axis = label.dim() == input.dim()
    if input.dtype is torch.bfloat16:
        input = input.float()
    logits = input.movedim(axis, 1) if input.dim() > 2 else input
    if soft_label:
        target = label.movedim(axis, 1) if label.dim() > 2 else label
    else:
        target = (label.squeeze(axis) if has_class_axis else label).long()
    options: dict[str, Any] = {"weight": weight, "reduction": reduction}
    if not use_softmax and not soft_label:
        loss = F.nll_loss(logits.log(), target, ignore_index=ignore_index, **options)
    else:
        if not use_softmax:
            # The softmax of the logarithms of probabilities is the probabilities.
            logits = logits.log()
        options |= {"ignore_index": -100 if soft_label else ignore_index}
        loss = F.cross_entropy(logits, target, label_smoothing=label_smoothing, **options)
    return loss.unsqueeze(axis) if reduction == "none" and has_class_axis else loss


def softmax_with_cross_entropy(
    logits: Tensors,
    label: Tensors,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """Return the cross entropy of each sample, and with `return_softmax` the softmax too."""
    loss = cross_entropy(
        logits,
        label,
        ignore_index=ignore_index,
        reduction="none",
        soft_label=soft_label,
        axis=axis,
    )
    return (loss, softmax(logits, axis)) if return_softmax else loss


def check_channels_first(data_format: str, allowed: str) -> None:
    """Raise for images with channels last."""
    if data_format != allowed:
        raise ValueError(
            f"data_format={data_format!r} is not supported, only {allowed!r}. Transpose the images,"
            " and for speed use mezzo.train_step(channels_last=...)."
        )


def _dtype(dtype: Any) -> dict[str, Any]:
    return {} if dtype is None else {"dtype": parse_dtype(dtype)}


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=F)
