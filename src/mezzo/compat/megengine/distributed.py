"""`megengine.distributed`: rank and number of processes, of torch.distributed or of torchrun."""

from __future__ import annotations

import os

from torch import distributed

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS

__all__ = ["get_rank", "get_world_size", "is_distributed"]


def is_distributed() -> bool:
    """Return whether this process is in a group."""
    return distributed.is_available() and distributed.is_initialized()


def get_rank() -> int:
    """Return the rank of this process; 0 without a group.

    >>> get_rank(), get_world_size()
    (0, 1)
    """
    return distributed.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of processes."""
    if is_distributed():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
