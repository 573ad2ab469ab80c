"""`gluon.loss`: losses with one value for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet import _ops
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet.gluon.block import Layer

__all__ = [
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "L2Loss",
    "Loss",
    "SigmoidBCELoss",
    "SigmoidBinaryCrossEntropyLoss",
    "SoftmaxCELoss",
    "SoftmaxCrossEntropyLoss",
]

Tensor = torch.Tensor


class Loss(Layer):
    """Base class: weights a loss and averages it over all axes but the batch's."""

    def __init__(
        self, weight: float | None, batch_axis: int = 0, prefix: str | None = None, **_: Any
    ) -> None:
        super().__init__(prefix)
        self._weight, self._batch_axis = weight, batch_axis

    def _per_sample(self, loss: Tensor, sample_weight: Tensor | None) -> Tensor:
        if sample_weight is not None:
            loss = loss * sample_weight
        if self._weight is not None:
            loss = loss * self._weight
        return _ops.mean(loss, self._batch_axis, exclude=True)


class SoftmaxCrossEntropyLoss(Loss):
    """Cross entropy of the softmax, for class numbers (`sparse_label`) or probabilities.

    >>> loss = SoftmaxCrossEntropyLoss()
    >>> loss(torch.zeros(2, 4), torch.tensor([0.0, 3.0]))
    tensor([1.3863, 1.3863])
    """

    def __init__(
        self,
        axis: int = -1,
        sparse_label: bool = True,
        from_logits: bool = False,
        weight: float | None = None,
        batch_axis: int = 0,
        prefix: str | None = None,
    ) -> None:
        super().__init__(weight, batch_axis, prefix)
        self._axis, self._sparse_label, self._from_logits = axis, sparse_label, from_logits

    def forward(self, pred: Tensor, label: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        log_probabilities = pred if self._from_logits else torch.log_softmax(pred, self._axis)
        if self._sparse_label:
            loss = -_ops.pick(log_probabilities, label, self._axis, keepdims=True)
        else:
            label = label.reshape(log_probabilities.shape)
            loss = -(log_probabilities * label).sum(self._axis, keepdim=True)
        return self._per_sample(loss, sample_weight)


class L2Loss(Loss):
    """Half the squared error."""

    def __init__(self, weight: float = 1.0, batch_axis: int = 0, prefix: str | None = None) -> None:
        super().__init__(weight / 2, batch_axis, prefix)

    def forward(self, pred: Tensor, label: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        return self._per_sample(torch.square(label.reshape(pred.shape) - pred), sample_weight)


class L1Loss(Loss):
    """The absolute error."""

    def __init__(
        self, weight: float | None = None, batch_axis: int = 0, prefix: str | None = None
    ) -> None:
        super().__init__(weight, batch_axis, prefix)

    def forward(self, pred: Tensor, label: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        return self._per_sample(torch.abs(label.reshape(pred.shape) - pred), sample_weight)


class HuberLoss(Loss):
    """The squared error up to `rho` and the absolute error beyond."""

    def __init__(
        self,
        rho: float = 1.0,
        weight: float | None = None,
        batch_axis: int = 0,
        prefix: str | None = None,
    ) -> None:
        super().__init__(weight, batch_axis, prefix)
        self._rho = rho

    def forward(self, pred: Tensor, label: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        error = torch.abs(label.reshape(pred.shape) - pred)
        quadratic = 0.5 / self._rho * torch.square(error)
        loss = torch.where(error > self._rho, error - 0.5 * self._rho, quadratic)
        return self._per_sample(loss, sample_weight)


class SigmoidBinaryCrossEntropyLoss(Loss):
    """Binary cross entropy of logits, or with `from_sigmoid` of probabilities."""

    def __init__(
        self,
        from_sigmoid: bool = False,
        weight: float | None = None,
        batch_axis: int = 0,
        prefix: str | None = None,
    ) -> None:
        super().__init__(weight, batch_axis, prefix)
        self._from_sigmoid = from_sigmoid

    def forward(
        self,
        pred: Tensor,
        label: Tensor,
        sample_weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each sample."""
        label = label.reshape(pred.shape).to(pred.dtype)
        if self._from_sigmoid:
            positive = label * torch.log(pred + 1e-12)
            positive = positive if pos_weight is None else positive * pos_weight
            loss = -(positive + (1 - label) * torch.log(1 - pred + 1e-12))
        else:
            loss = functional.binary_cross_entropy_with_logits(
                pred, label, reduction="none", pos_weight=pos_weight
            )
        return self._per_sample(loss, sample_weight)


class KLDivLoss(Loss):
    """Kullback-Leibler divergence of log-probabilities, or with `from_logits=False` of logits."""

    def __init__(
        self,
        from_logits: bool = True,
        axis: int = -1,
        weight: float | None = None,
        batch_axis: int = 0,
        prefix: str | None = None,
    ) -> None:
        super().__init__(weight, batch_axis, prefix)
        self._from_logits, self._axis = from_logits, axis

    def forward(self, pred: Tensor, label: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of each sample."""
        pred = pred if self._from_logits else torch.log_softmax(pred, self._axis)
        return self._per_sample(label * (torch.log(label + 1e-12) - pred), sample_weight)


SoftmaxCELoss = SoftmaxCrossEntropyLoss
SigmoidBCELoss = SigmoidBinaryCrossEntropyLoss

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
