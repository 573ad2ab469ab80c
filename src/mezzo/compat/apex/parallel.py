"""Apex's `parallel` by name: torch has had all of it for long."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import SyncBatchNorm

from mezzo._errors import UnsupportedError

__all__ = ["LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"]

_TUNING = (
    "message_size delay_allreduce shared_param allreduce_trigger_params retain_allreduce_buffers"
    " allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average"
    " gradient_predivide_factor gradient_average_split_factor prof"
).split()
"""How Apex's wrapper is told to overlap and reduce. torch's decides by itself, and always
averages."""


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's own wrapper with Apex's arguments: of those, what only tunes is taken and has no effect."""

    def __init__(self, module: nn.Module, *tuning: Any, **words: Any) -> None:
        given = dict(zip(_TUNING, tuning, strict=False)) | words
        if given.get("gradient_average") is False:
            raise NotImplementedError(
                "torch's DistributedDataParallel averages gradients. Multiply the loss by the"
                " number of processes, and leave gradient_average out."
            )
        super().__init__(
            module, **{name: value for name, value in given.items() if name not in _TUNING}
        )


# Apex's call shape.
def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """A model whose batch norms share their statistics between processes."""
    converted: nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


class LARC:
    """Not there: neither torch nor mezzo adapts the rate layer by layer but in LAMB."""

    remedy = "Use mezzo.LAMB, whose rates adapt layer by layer too, or a schedule that warms up."

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not available here. {self.remedy}")


class Reducer(LARC):
    """Not there: torch's wrapper reduces by itself."""

    remedy = (
        "Wrap the model in DistributedDataParallel, or call torch.distributed.all_reduce on the"
        " gradients."
    )
