"""The output layers of `mxnet.nd`.

Their forward returns predictions; their backward ignores the incoming gradient and gives the
gradient of the layer's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mezzo._casting import cast
from mezzo._errors import PolicyError, choices
from mezzo.compat.mxnet.amp._scaling import output_with_gradient

__all__ = [
    "LinearRegressionOutput",
    "LogisticRegressionOutput",
    "MAERegressionOutput",
    "SoftmaxOutput",
]

Unary = Callable[[torch.Tensor], torch.Tensor]

_NORMALIZATIONS = ("null", "batch", "valid")


def SoftmaxOutput(
    data: torch.Tensor,
    label: torch.Tensor,
    grad_scale: float = 1.0,
    ignore_label: float = -1.0,
    multi_output: bool = False,
    use_ignore: bool = False,
    preserve_shape: bool = False,
    normalization: str = "null",
    out_grad: bool = False,
    smooth_alpha: float = 0.0,
    name: str | None = None,
) -> torch.Tensor:
    """Return the softmax; backward gives the gradient of the cross entropy with the labels.

    It is the sum over samples (`normalization="null"`), divided by the number of samples
    (`"batch"`), or of samples not ignored (`"valid"`). `out_grad=True` multiplies it by the
    incoming gradient. `smooth_alpha` is the total target probability of the other classes.

    >>> logits = torch.zeros(1, 2, requires_grad=True)
    >>> SoftmaxOutput(logits, torch.tensor([1.0])).sum().backward()
    >>> logits.grad
    tensor([[ 0.5000, -0.5000]])
    """
    if normalization not in _NORMALIZATIONS:
        raise PolicyError(f"Unknown normalization {normalization!r}. {choices(_NORMALIZATIONS)}")
    axis = -1 if preserve_shape or not multi_output else 1
    data32 = cast(data, torch.float32)
    flat = data32 if preserve_shape or multi_output else data32.flatten(1)
    probabilities = flat.detach().softmax(axis)
    label_shape = list(probabilities.shape)
    del label_shape[axis]
    classes = _reshape_label("SoftmaxOutput", label, label_shape, data).long()

    def gradient() -> torch.Tensor:
        valid = (
            classes != int(ignore_label)
            if use_ignore
            else torch.ones_like(classes, dtype=torch.bool)
        )
        smoothed = smooth_alpha / max(probabilities.shape[axis] - 1, 1)
        target = torch.full_like(probabilities, smoothed).scatter_(
            axis, (classes * valid).unsqueeze(axis), 1.0 - smooth_alpha
        )
        gradient = (probabilities - target) * valid.unsqueeze(axis) * grad_scale
        if normalization != "null":
            gradient = gradient / (
                len(data) if normalization == "batch" else valid.sum().clamp(min=1)
            )
        return gradient.reshape(data32.shape)

    return output_with_gradient(
        data32, probabilities.reshape(data32.shape), gradient, times_incoming=out_grad
    )


def LinearRegressionOutput(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float = 1.0, name: str | None = None
) -> torch.Tensor:
    """Return the data; backward gives the gradient of half the squared error."""
    return _regression(data, label, grad_scale, _identity, _identity)


def LogisticRegressionOutput(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float = 1.0, name: str | None = None
) -> torch.Tensor:
    """Return the sigmoid; backward gives the gradient of the binary cross entropy."""
    return _regression(data, label, grad_scale, torch.sigmoid, _identity)


def MAERegressionOutput(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float = 1.0, name: str | None = None
) -> torch.Tensor:
    """Return the data; backward gives the gradient of the absolute error."""
    return _regression(data, label, grad_scale, _identity, torch.sign)


def _identity(value: torch.Tensor) -> torch.Tensor:
    return value


def _reshape_label(
    layer: str, label: torch.Tensor, shape: Sequence[int], data: torch.Tensor
) -> torch.Tensor:
    if label.numel() != math.prod(shape):
        raise ValueError(
            f"{layer} got labels of shape {tuple(label.shape)} for data of shape"
            f" {tuple(data.shape)}. Pass labels of shape {tuple(shape)}."
        )
    return label.reshape(shape)


def _regression(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float, forward: Unary, derivative: Unary
) -> torch.Tensor:
    data32 = cast(data, torch.float32)
    output = forward(data32.detach())
    target = cast(_reshape_label("The output layer", label, output.shape, data), torch.float32)
    # As in MXNet: divided by the elements of one sample, not by the number of samples.
    factor = grad_scale / max(output[0].numel(), 1) if output.dim() else grad_scale
    return output_with_gradient(data32, output, lambda: derivative(output - target) * factor)
