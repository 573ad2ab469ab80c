"""`oneflow.nn`: `Graph` and `CrossEntropyLoss`; every other name is `torch.nn`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn as _nn

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


def __getattr__(name: str) -> Any:
    return getattr(_nn, name)
