"""`oneflow.env`: rank and number of processes, of torch.distributed or of torchrun."""

from __future__ import annotations

import os

from torch import distributed

from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS

__all__ = ["get_local_rank", "get_rank", "get_world_size"]


def get_rank() -> int:
    """Return the rank of this process; 0 without a group.

    >>> get_rank(), get_world_size(), get_local_rank()
    (0, 1, 0)
    """
    return distributed.get_rank() if _has_group() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if _has_group() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
