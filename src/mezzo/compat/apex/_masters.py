"""Masters for parameters that are 16-bit already: what `FP16_Optimizer` is for, and what `initialize` does where it does not cast."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.optim import saved
from mezzo.optim.bind import bind
from mezzo.optim.masters import Masters
from mezzo.scaling.gradients import parameters


def keep_masters(optimizer: torch.optim.Optimizer) -> Masters:
    """Let an optimizer step float32 masters of its 16-bit parameters, those of groups that are added later too."""
    masters = Masters()
    _adopt(optimizer, masters)
    bind(optimizer, masters)
    saved.install(optimizer, masters, ExitStack())
    optimizer.register_step_pre_hook(lambda *_: _adopt(optimizer, masters))
    return masters


def _adopt(optimizer: torch.optim.Optimizer, masters: Masters) -> None:
    for parameter in parameters(optimizer):
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES and parameter not in masters:
            masters.adopt(parameter, parameter.dtype)  # type: ignore[arg-type]
