"""Optimizers whose parameters are 16-bit already: their arithmetic and their states are float32 all the same."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast as typed

import torch

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo.optim import saved
from mezzo.optim.bind import bind, refuse_wrapper
from mezzo.optim.masters import Masters, Parameter
from mezzo.policy.types import Master
from mezzo.scaling.gradients import parameters


def step_halves(optimizer: torch.optim.Optimizer, master: Master = Master.FLOAT32, *, clip_norm: float | None = None) -> Masters:
    """Let an optimizer step its 16-bit parameters in float32, with masters beside them or without; those of groups that are added later too.

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    >>> optimizer = torch.optim.Adam([weight], lr=0.1)
    >>> masters = step_halves(optimizer, Master.NONE)
    >>> weight.grad = torch.full((1,), 1e-4, dtype=torch.float16)  # its square is no float16
    >>> optimizer.step()
    >>> weight.item(), optimizer.state[weight]["exp_avg_sq"].dtype
    (0.89990234375, torch.float32)
    """
    refuse_wrapper(optimizer)
    masters = Masters(master)
    adopt_halves(optimizer, masters)
    bind(optimizer, masters, clip_norm=clip_norm)
    saved.install(optimizer, masters, ExitStack())
    optimizer.register_step_pre_hook(lambda *_: adopt_halves(optimizer, masters))
    return masters


def adopt_halves(optimizer: torch.optim.Optimizer, masters: Masters) -> None:
    """Keep masters of an optimizer's 16-bit parameters that have none, starting from the values that they have."""
    for parameter in parameters(optimizer):
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES and parameter not in masters:
            masters.adopt(typed("Parameter", parameter), parameter.dtype)
            state = optimizer.state.get(parameter, {})
            # Some make their state when they are made, of the parameter's dtype.
            state.update({name: cast(value, torch.float32) for name, value in state.items() if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES})
