"""`apex.parallel`: torch's own DistributedDataParallel and SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import SyncBatchNorm

from mezzo._errors import UnsupportedError
from mezzo.compat._missing import module_getattr
from mezzo.compat.apex._substitutions import SUBSTITUTIONS

__all__ = ["LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"]

_TUNING_ARGUMENTS = (
    "message_size delay_allreduce shared_param allreduce_trigger_params retain_allreduce_buffers"
    " allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average"
    " gradient_predivide_factor gradient_average_split_factor prof"
).split()
"""Apex's arguments for overlap and reduction, in order. torch decides by itself and always
averages."""


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel`; Apex's tuning arguments have no effect."""

    def __init__(self, module: nn.Module, *tuning: Any, **kwargs: Any) -> None:
        arguments = dict(zip(_TUNING_ARGUMENTS, tuning, strict=False)) | kwargs
        if arguments.get("gradient_average") is False:
            raise NotImplementedError(
                "torch's DistributedDataParallel averages gradients. Multiply the loss by the"
                " number of processes, and leave gradient_average out."
            )
        super().__init__(
            module,
            **{name: value for name, value in arguments.items() if name not in _TUNING_ARGUMENTS},
        )


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Return the model with batch norms that share statistics between processes."""
    converted: nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


class LARC:
    """Not available: of torch and mezzo, only `mezzo.LAMB` adapts learning rates per layer."""

    remedy = "Use mezzo.LAMB, which also adapts rates per layer, or a warm-up schedule."

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not available here. {self.remedy}")


class Reducer(LARC):
    """Not available: torch's DistributedDataParallel reduces gradients by itself."""

    remedy = (
        "Wrap the model in DistributedDataParallel, or call torch.distributed.all_reduce on the"
        " gradients."
    )


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=nn.parallel)
