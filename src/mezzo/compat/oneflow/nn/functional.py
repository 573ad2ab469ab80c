"""`oneflow.nn.functional`: `cross_entropy`; every other name is `torch.nn.functional`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as _functional

from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS


def cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` that also accepts integer targets of shape (N, 1, ...).

    >>> logits, column = torch.zeros(2, 4), torch.ones(2, 1, dtype=torch.int64)
    >>> torch.equal(cross_entropy(logits, column), cross_entropy(logits, column[:, 0]))
    True
    """
    if not target.is_floating_point():
        # torch accepts int64 only, OneFlow int32 as well.
        target = target.long()
        if target.dim() == input.dim() and target.dim() > 1 and target.shape[1] == 1:
            target = target.squeeze(1)
    return _functional.cross_entropy(input, target, *args, **kwargs)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, fallback=_functional)
