"""`gluoncv.loss.SSDMultiBoxLoss`: the loss of SSD with hard negative mining."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo.compat._missing import module_getattr
from mezzo.compat.gluoncv._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet import _ops
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor
from mezzo.compat.mxnet.gluon.block import Block

__all__ = ["SSDMultiBoxLoss"]

Tensor = torch.Tensor
Losses = list[Any]


class SSDMultiBoxLoss(Block):
    """Cross entropy of positive and hard negative anchors, and smooth L1 of positive boxes.

    Takes lists of arrays, one for each context, or single arrays. Returns lists of the sums, of the
    class losses and of the box losses, with one value for each sample; all are divided by the
    number of positive anchors of the whole batch. Does not synchronize.

    >>> loss = SSDMultiBoxLoss()
    >>> scores, boxes = torch.zeros(1, 4, 2), torch.zeros(1, 4, 4)
    >>> total, classes, positions = loss(scores, boxes, torch.tensor([[1.0, 0, 0, 0]]), boxes)
    >>> classes
    [tensor([2.7726])]
    """

    def __init__(
        self,
        negative_mining_ratio: float = 3,
        rho: float = 1.0,
        lambd: float = 1.0,
        min_hard_negatives: int = 0,
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        self._negative_mining_ratio = max(0, negative_mining_ratio)
        self._rho, self._lambd = rho, lambd
        self._min_hard_negatives = max(0, min_hard_negatives)

    def forward(
        self, cls_pred: Any, box_pred: Any, cls_target: Any, box_target: Any
    ) -> tuple[Losses, Losses, Losses]:
        """Return the losses of each sample: their sums, of the classes, and of the boxes."""
        lists = [_as_list(value) for value in (cls_pred, box_pred, cls_target, box_target)]
        if len({len(values) for values in lists}) != 1:
            raise ValueError(
                "SSDMultiBoxLoss got lists of different lengths for cls_pred, box_pred, cls_target"
                f" and box_target: {[len(values) for values in lists]}. Pass one array of each for"
                " every context."
            )
        targets = [as_tensor(target) for target in lists[2]]
        device = targets[0].device
        positives = sum((target > 0).sum().to(device) for target in targets)
        cls_losses, box_losses = [], []
        for values in zip(*lists, strict=True):
            scores, boxes, classes, positions = map(as_tensor, values)
            divisor = torch.as_tensor(positives).to(scores.device).clamp(min=1)
            cls_losses.append(self._class_loss(scores, classes) / divisor)
            box_losses.append(self._box_loss(boxes, classes, positions) / divisor)
        sums = [
            class_loss + self._lambd * box_loss
            for class_loss, box_loss in zip(cls_losses, box_losses, strict=True)
        ]
        if not any(isinstance(value, NDArray) for values in lists for value in values):
            return sums, cls_losses, box_losses
        wrapped = map_tensors((sums, cls_losses, box_losses), as_ndarray)
        return wrapped[0], wrapped[1], wrapped[2]

    def _class_loss(self, scores: Tensor, classes: Tensor) -> Tensor:
        """Return the cross entropy of the positive anchors and of the worst negative ones."""
        loss = -_ops.pick(torch.log_softmax(scores, -1), classes)
        is_positive = classes > 0
        # Positive anchors have 0 here and come last; negative ones are sorted by their loss.
        negative_loss = torch.where(is_positive, 0.0, -loss.detach())
        rank = negative_loss.argsort(1).argsort(1)
        count = (is_positive.sum(1) * self._negative_mining_ratio).clamp(
            min=self._min_hard_negatives
        )
        is_used = is_positive | (rank < count.unsqueeze(-1))
        return torch.where(is_used, loss, 0.0).sum(1)

    def _box_loss(self, boxes: Tensor, classes: Tensor, positions: Tensor) -> Tensor:
        """Return the smooth L1 loss of the boxes of positive anchors."""
        error = torch.abs(boxes.reshape(positions.shape) - positions)
        quadratic = 0.5 / self._rho * torch.square(error)
        loss = torch.where(error > self._rho, error - 0.5 * self._rho, quadratic)
        return (loss * (classes > 0).unsqueeze(-1)).sum((1, 2))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
