"""Bind an optimizer to its parameters: choose the step that updates them, with or without master weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast as typed

import torch

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import UnsupportedError
from mezzo.optim import state_dict
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.master_weights import MasterWeights, Parameter
from mezzo.policy.types import Master
from mezzo.scaling.gradients import parameters
from mezzo.scaling.optimizer_step import inner_optimizers

_WRAPPERS = {
    "AcceleratedOptimizer": (
        "First decorate, then wrap: mezzo.decorate(model, optimizer, ...), then"
        " accelerator.prepare(model, optimizer)."
    ),
    "_FabricOptimizer": (
        "First decorate, then wrap: mezzo.decorate(model, optimizer, ...), then fabric.setup(model,"
        " optimizer)."
    ),
    "ZeroRedundancyOptimizer": (
        "Pass the one of this process: mezzo.decorate(model, optimizer.optim, ...,"
        " master='float32'), with parameters_as_bucket_view=False, and step the"
        " ZeroRedundancyOptimizer as before. Save optimizer.optim.state_dict() in every process:"
        " its own state_dict() leaves the master weights out."
    ),
}
"""Wrappers that need more than the inner optimizer's name."""


def bind_optimizer(
    optimizer: torch.optim.Optimizer, masters: MasterWeights, *, clip_norm: float | None = None
) -> OptimizerBinding:
    """Let an optimizer's `step` run over exact weights."""
    refuse_wrapper(optimizer)
    kind = FusedBinding if algorithm_name(optimizer) in ALGORITHMS else OptimizerBinding
    return kind(optimizer, masters, clip_norm=clip_norm)


def refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps another one: that would update the 16-bit parameters, and not their master weights."""
    inner = inner_optimizers(optimizer)
    if not inner:
        return
    # Of wrappers in wrappers the innermost do the arithmetic.
    paths = [path for path, one in inner.items() if not inner_optimizers(one)]
    named = [f"optimizer{path}" for path in paths]
    known = next(
        (remedy for kind in type(optimizer).__mro__ if (remedy := _WRAPPERS.get(kind.__name__))),
        None,
    )
    passed = named[0] if len(named) == 1 else f"[{', '.join(named)}]"
    remedy = known or (
        f"Pass the inner one: mezzo.decorate(model, {passed}, ...), before it is wrapped where you"
        " make it yourself, and step the wrapper as before. Where the wrapper writes parameters"
        " too, as SAM does, leave master='float32': other masters start anew from what it writes."
        " Where it averages parameters, as Lookahead does, use policy 'O1': its averages of 16-bit"
        " parameters would lose small updates."
    )
    raise UnsupportedError(
        f"{type(optimizer).__name__} steps another optimizer,"
        f" {' and '.join(f'{path} ({type(inner[path]).__name__})' for path in paths)}, which would"
        " update the parameters past what decorate binds to the step: master weights and clipping."
        f" {remedy}"
    )


def bind_half_parameters(
    optimizer: torch.optim.Optimizer,
    master: Master = Master.FLOAT32,
    *,
    clip_norm: float | None = None,
) -> MasterWeights:
    """Let an optimizer step its 16-bit parameters in float32, with masters beside them or without; those of groups that are added later too.

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    >>> optimizer = torch.optim.Adam([weight], lr=0.1)
    >>> masters = bind_half_parameters(optimizer, Master.NONE)
    >>> weight.grad = torch.full((1,), 1e-4, dtype=torch.float16)  # its square is no float16
    >>> optimizer.step()
    >>> weight.item(), optimizer.state[weight]["exp_avg_sq"].dtype
    (0.89990234375, torch.float32)
    """
    refuse_wrapper(optimizer)
    masters = MasterWeights(master)
    adopt_half_parameters(optimizer, masters)
    bind_optimizer(optimizer, masters, clip_norm=clip_norm)
    state_dict.hook_state_dict(optimizer, masters, ExitStack())
    optimizer.register_step_pre_hook(lambda *_: adopt_half_parameters(optimizer, masters))
    return masters


def adopt_half_parameters(optimizer: torch.optim.Optimizer, masters: MasterWeights) -> None:
    """Keep masters of an optimizer's 16-bit parameters that have none, starting from the values that they have."""
    for parameter in parameters(optimizer):
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES and parameter not in masters:
            masters.adopt(typed("Parameter", parameter), parameter.dtype)
            state = optimizer.state.get(parameter, {})
            # Some make their state when they are made, of the parameter's dtype.
            state.update(
                {
                    name: cast(value, torch.float32)
                    for name, value in state.items()
                    if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES
                }
            )
