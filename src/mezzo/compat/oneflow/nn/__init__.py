"""OneFlow's `nn`: torch's modules, `Graph`, and losses with OneFlow's defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch import nn as _nn

from mezzo.compat.oneflow.nn import functional
from mezzo.compat.oneflow.nn.functional import cross_entropy
from mezzo.compat.oneflow.nn.graph import Graph


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's, for targets of shape (N, 1) too.

    >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.ones(2, 1, dtype=torch.int64)).shape
    torch.Size([])
    """

    # Torch's word.
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
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
