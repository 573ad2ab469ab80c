"""`megengine.functional.loss`: losses composed of the same ops as MegEngine's.

The same op rules then give the same dtypes: 16-bit logits give a float32 loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mezzo._errors import PolicyError, choices
from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS

__all__ = ["binary_cross_entropy", "cross_entropy", "hinge_loss", "l1_loss", "square_loss"]

_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "none": lambda loss: loss,
}


def l1_loss(pred: torch.Tensor, label: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the mean absolute difference."""
    return _reduce(torch.abs(pred - label), reduction)


def square_loss(pred: torch.Tensor, label: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the mean squared difference."""
    return _reduce((pred - label) ** 2, reduction)


def cross_entropy(
    pred: torch.Tensor,
    label: torch.Tensor,
    axis: int = 1,
    with_logits: bool = True,
    label_smooth: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of logits, or of probabilities with `with_logits=False`.

    Labels may have any integer dtype.

    >>> round(cross_entropy(torch.zeros(1, 2), torch.ones(1, dtype=torch.int32)).item(), 4)
    0.6931
    """
    for name, value in (("pred", pred), ("label", label)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"cross_entropy takes tensors, got {type(value).__name__} as {name}. Convert it:"
                " megengine.tensor(array)."
            )
    if pred.dim() != label.dim() + 1:
        raise AssertionError(
            f"target ndim must be one less than input ndim; input_ndim={pred.dim()}"
            f" target_ndim={label.dim()}. Pass one class index per row of logits."
        )
    chosen = pred.gather(axis, label.long().unsqueeze(axis)).squeeze(axis)
    if with_logits:
        normalizer, logs = _logsumexp(pred, axis), pred
    else:
        normalizer, chosen, logs = torch.zeros_like(chosen), torch.log(chosen), torch.log(pred)
    if not label_smooth:
        return _reduce(normalizer, reduction) - _reduce(chosen, reduction)
    uniform = logs.mean(axis)
    return (
        _reduce(normalizer, reduction)
        - label_smooth * _reduce(uniform, reduction)
        - (1 - label_smooth) * _reduce(chosen, reduction)
    )


def binary_cross_entropy(
    pred: torch.Tensor, label: torch.Tensor, with_logits: bool = True, reduction: str = "mean"
) -> torch.Tensor:
    """Return the binary cross entropy of logits, or of probabilities."""
    if with_logits:
        sigmoid = torch.nn.functional.logsigmoid
        return _reduce(-(label * sigmoid(pred) + (1 - label) * sigmoid(-pred)), reduction)
    return _reduce(-(label * torch.log(pred) + (1 - label) * torch.log(1 - pred)), reduction)


def hinge_loss(
    pred: torch.Tensor, label: torch.Tensor, norm: str = "L1", reduction: str = "mean"
) -> torch.Tensor:
    """Return the hinge loss for labels of −1 and 1."""
    if norm not in ("L1", "L2"):
        raise AssertionError(f"norm must be L1 or L2, got {norm!r}.")
    margin = torch.relu(1.0 - pred * label)
    return _reduce((margin if norm == "L1" else margin**2).sum(1), reduction)


def _logsumexp(logits: torch.Tensor, axis: int) -> torch.Tensor:
    largest = logits.detach().amax(axis, keepdim=True)
    return largest.squeeze(axis) + torch.log(torch.exp(logits - largest).sum(axis))


def _reduce(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in _REDUCTIONS:
        raise PolicyError(f"Unknown reduction {reduction!r}. {choices(_REDUCTIONS)}")
    return _REDUCTIONS[reduction](loss)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.nn.functional)
