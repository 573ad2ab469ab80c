"""`paddle.distributed`: this process in its group, on torch.distributed."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS

__all__ = ["ParallelEnv", "get_rank", "get_world_size", "init_parallel_env", "is_initialized"]


def is_initialized() -> bool:
    """Return whether this process is in a group."""
    return distributed.is_available() and distributed.is_initialized()


def get_rank(group: Any = None) -> int:
    """Return the rank of this process; 0 without a group.

    >>> get_rank(), get_world_size()
    (0, 1)
    """
    return distributed.get_rank(group) if is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size(group: Any = None) -> int:
    """Return the number of processes; that of torchrun before `init_parallel_env`."""
    if is_initialized():
        return distributed.get_world_size(group)
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_parallel_env() -> ParallelEnv:
    """Make the group of the processes that torchrun started; one process has no group."""
    if get_world_size() > 1 and not is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return ParallelEnv()


class ParallelEnv:
    """`paddle.distributed.ParallelEnv`: rank and number of processes."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return get_rank()

    local_rank = rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return get_world_size()

    nranks = world_size

    @property
    def device_id(self) -> int:
        """The index of this process's device on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    dev_id = device_id


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=distributed)
