"""`oneflow.nn.functional`: cross entropy. Every other name is `torch.nn.functional`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as _functional


# Torch's word.
def cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch's cross entropy, and classes in a column: a target of shape (N, 1, ...) of integers is (N, ...).

    >>> cross_entropy(torch.zeros(2, 4), torch.ones(2, 1, dtype=torch.int64)).item() == cross_entropy(torch.zeros(2, 4), torch.tensor([1, 1])).item()
    True
    """
    if not target.is_floating_point():
        # torch takes int64 alone; OneFlow takes int32 too.
        target = target.long()
        if target.dim() == input.dim() and target.dim() > 1 and target.shape[1] == 1:
            target = target.squeeze(1)
    return _functional.cross_entropy(input, target, *args, **kwargs)


def __getattr__(name: str) -> Any:
    return getattr(_functional, name)
