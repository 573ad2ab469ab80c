"""`oneflow.nn`: `Graph` and `CrossEntropyLoss`; every other name is `torch.nn`'s."""

from __future__ import annotations

import torch
from torch import nn as _nn

from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS
from mezzo.compat.oneflow.nn import functional
from mezzo.compat.oneflow.nn.functional import cross_entropy
from mezzo.compat.oneflow.nn.graph import Graph


class CrossEntropyLoss(_nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` that also accepts targets of shape (N, 1).

    >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.ones(2, 1, dtype=torch.int64)).shape
    torch.Size([])
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


__all__ = ["CrossEntropyLoss", "Graph", "functional"]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, fallback=_nn)
