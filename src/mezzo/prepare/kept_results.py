"""Copy models whose modules keep results of a forward pass, as of the old `weight_norm`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def kept_results(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `deepcopy(model, memo)`, which copies no tensor that has a history.

    >>> from copy import deepcopy
    >>> model = nn.Linear(2, 1)
    >>> model.kept = model.weight * 2
    >>> bool(deepcopy(model, kept_results(model)).kept.requires_grad)
    False
    """
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
