"""`mxnet.nd`, as far as it holds output layers: what they give is for looking at, what they send back is the gradient of their loss."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mezzo._casting import cast
from mezzo._errors import PolicyError, choices
from mezzo.compat.mxnet.amp._init import output_with_gradient

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
    """Probabilities; backward is that of their cross entropy with the classes, summed (`null`), or divided by the samples (`batch`, `valid` without ignored ones).

    `out_grad=True` multiplies it by the incoming gradient after all, `smooth_alpha` is what the
    other classes get together.

    >>> logits = torch.zeros(1, 2, requires_grad=True)
    >>> SoftmaxOutput(logits, torch.tensor([1.0])).sum().backward()
    >>> logits.grad
    tensor([[ 0.5000, -0.5000]])
    """
    if normalization not in _NORMALIZATIONS:
        raise PolicyError(f"normalization={normalization!r}. {choices(_NORMALIZATIONS)}")
    axis = -1 if preserve_shape or not multi_output else 1
    wide = cast(data, torch.float32)
    flat = wide if preserve_shape or multi_output else wide.flatten(1)
    probabilities = flat.detach().softmax(axis)
    classes = label.long().reshape(
        [
            size
            for place, size in enumerate(probabilities.shape)
            if place != axis % probabilities.dim()
        ]
    )

    def gradient() -> torch.Tensor:
        kept = (
            classes != int(ignore_label)
            if use_ignore
            else torch.ones_like(classes, dtype=torch.bool)
        )
        others = smooth_alpha / max(probabilities.shape[axis] - 1, 1)
        hot = torch.full_like(probabilities, others).scatter_(
            axis, (classes * kept).unsqueeze(axis), 1.0 - smooth_alpha
        )
        gradient = (probabilities - hot) * kept.unsqueeze(axis) * grad_scale
        if normalization != "null":
            gradient = gradient / (
                len(data) if normalization == "batch" else kept.sum().clamp(min=1)
            )
        return gradient.reshape(wide.shape)

    return output_with_gradient(
        wide, probabilities.reshape(wide.shape), gradient, times_incoming=out_grad
    )


# MXNet's spelling.
def LinearRegressionOutput(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float = 1.0, name: str | None = None
) -> torch.Tensor:
    """The data themselves; backward is that of half their squared distance from the labels."""
    return _regression(data, label, grad_scale, lambda wide: wide, lambda difference: difference)


# MXNet's spelling.
def LogisticRegressionOutput(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float = 1.0, name: str | None = None
) -> torch.Tensor:
    """The sigmoid; backward is that of its binary cross entropy with the labels."""
    return _regression(data, label, grad_scale, torch.sigmoid, lambda difference: difference)


# MXNet's spelling.
def MAERegressionOutput(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float = 1.0, name: str | None = None
) -> torch.Tensor:
    """The data themselves; backward is that of their absolute distance from the labels."""
    return _regression(data, label, grad_scale, lambda wide: wide, torch.sign)


def _regression(
    data: torch.Tensor, label: torch.Tensor, grad_scale: float, forward: Unary, slope: Unary
) -> torch.Tensor:
    wide = cast(data, torch.float32)
    output = forward(wide.detach())
    target = cast(label, torch.float32).reshape(output.shape)
    # As there: divided by the numbers of one sample, not by the samples.
    factor = grad_scale / max(output[0].numel(), 1) if output.dim() else grad_scale
    return output_with_gradient(wide, output, lambda: slope(output - target) * factor)
