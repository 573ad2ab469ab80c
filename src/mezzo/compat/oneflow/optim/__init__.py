"""`oneflow.optim`: `Adam`, `AdamW` and `LAMB` with OneFlow's arguments; other names are torch's."""

from __future__ import annotations

from typing import Any

import torch

import mezzo
from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS
from mezzo.compat.oneflow.optim import lr_scheduler

__all__ = ["LAMB", "Adam", "AdamW", "lr_scheduler"]


class _AdamArguments:
    """OneFlow's arguments, in front of an optimizer of torch."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        amsgrad: bool = False,
        do_bias_correction: bool = True,
        contiguous_params: bool = False,
        fused: bool = False,
    ) -> None:
        _check_bias_correction(do_bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)  # type: ignore[call-arg]


class Adam(_AdamArguments, torch.optim.Adam):
    """`oneflow.optim.Adam`: torch's, which always corrects the bias.

    >>> Adam([torch.nn.Parameter(torch.ones(1))], do_bias_correction=True).defaults["lr"]
    0.001
    """

    steps_as = torch.optim.Adam


class AdamW(_AdamArguments, torch.optim.AdamW):
    """`oneflow.optim.AdamW`: torch's, which always corrects the bias; `weight_decay` is 0."""

    steps_as = torch.optim.AdamW


class LAMB(mezzo.LAMB):
    """`oneflow.optim.LAMB`: `mezzo.LAMB`, with decoupled weight decay and bias correction."""

    steps_as = mezzo.LAMB

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        adam_w_mode: bool = True,
        do_bias_correction: bool = True,
        amsgrad: bool = False,
        contiguous_params: bool = False,
    ) -> None:
        _check_bias_correction(do_bias_correction)
        if not adam_w_mode or amsgrad:
            raise ValueError("LAMB(adam_w_mode=False, amsgrad=True) is not supported.")
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _check_bias_correction(do_bias_correction: bool) -> None:
    if not do_bias_correction:
        raise ValueError(
            "do_bias_correction=False is not supported: torch's optimizers correct the bias of the"
            " first steps. Leave the argument out, and warm the learning rate up."
        )


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, fallback=torch.optim)
