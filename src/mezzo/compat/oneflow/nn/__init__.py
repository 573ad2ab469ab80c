"""`oneflow.nn`: `Graph` and a cross entropy that takes targets of shape (N, 1). Every other name is `torch.nn`'s."""

from typing import Any

from torch import nn as _nn

from mezzo.compat.oneflow.nn import functional
from mezzo.compat.oneflow.nn.graph import Graph
from mezzo.compat.oneflow.nn.loss import CrossEntropyLoss

__all__ = ["CrossEntropyLoss", "Graph", "functional"]


def __getattr__(name: str) -> Any:
    return getattr(_nn, name)
