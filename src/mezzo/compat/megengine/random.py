"""`megengine.random`: random tensors on the default device, from torch's generators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine._tensor import Tensor
from mezzo.compat.megengine.device import default_device

__all__ = ["normal", "permutation", "seed", "uniform"]

Shape = int | Sequence[int] | None


def seed(seed: int) -> None:
    """Seed torch's generators on all devices.

    >>> seed(0)
    >>> first = normal(size=3)
    >>> seed(0)
    >>> torch.equal(first, normal(size=(3,)))
    True
    """
    torch.manual_seed(seed)


def normal(mean: float = 0.0, std: float = 1.0, size: Shape = None) -> torch.Tensor:
    """Return normally distributed values; a single one without `size`."""
    return torch.randn(_size(size), device=default_device()).as_subclass(Tensor) * std + mean


def uniform(low: float = 0.0, high: float = 1.0, size: Shape = None) -> torch.Tensor:
    """Return values in `[low, high)`; a single one without `size`."""
    values = torch.rand(_size(size), device=default_device()).as_subclass(Tensor)
    return values * (high - low) + low


def permutation(n: int) -> torch.Tensor:
    """Return the numbers below `n` in random order, as int32."""
    order = torch.randperm(n, dtype=torch.int32, device=default_device())
    return order.as_subclass(Tensor)


def _size(size: Shape) -> tuple[int, ...]:
    if size is None:
        return (1,)
    return (size,) if isinstance(size, int) else tuple(size)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch)
