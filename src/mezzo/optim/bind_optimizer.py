"""Bind an optimizer to master weights, and choose the step that updates its parameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast as typed

import torch

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import UnsupportedError
from mezzo.optim import state_dict
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.capturable_step import CAPTURABLE, CapturableBinding
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.master_weights import MasterWeights, Parameter
from mezzo.optim.muon_step import MuonBinding
from mezzo.optim.optimizers import LAMB
from mezzo.policy.types import Master
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import any_sharded
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
        "Each process would update and clip its own share only, and its checkpoints would lack the"
        " masters of the others. Shard parameters, gradients and states with FSDP2 instead:"
        " torch.distributed.fsdp.fully_shard(model), then create the optimizer, then"
        " mezzo.decorate(model, optimizer, ...)."
    ),
}
"""Class name → remedy, for wrappers that need more than the inner optimizer's name."""


def bind_optimizer(
    optimizer: torch.optim.Optimizer,
    masters: MasterWeights,
    *,
    clip_norm: float | None = None,
    takes_scale: bool = True,
) -> OptimizerBinding:
    """Make `optimizer.step()` update master weights, by a step on the device where there is one.

    `takes_scale` declares, by torch's protocol, that the step unscales gradients itself. Libraries
    refuse to clip the gradients of such an optimizer, so that it is not declared where nothing is
    scaled.
    """
    refuse_wrapper(optimizer)
    binding_class = _binding_class(optimizer, masters)
    return binding_class(optimizer, masters, clip_norm=clip_norm, takes_scale=takes_scale)


def has_device_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer without master weights can be stepped without a host read.

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> has_device_step(torch.optim.RMSprop([parameter]))
    True
    >>> has_device_step(torch.optim.Adafactor([parameter]))
    False
    """
    return _binding_class(optimizer, MasterWeights(Master.NONE)).captures


def _binding_class(
    optimizer: torch.optim.Optimizer, masters: MasterWeights
) -> type[OptimizerBinding]:
    algorithm = algorithm_name(optimizer)
    if any_sharded(parameters(optimizer)):
        # LAMB needs norms of whole parameters, and the other steps take no DTensors: these run
        # the optimizer's original step.
        is_elementwise = algorithm in ALGORITHMS and algorithm is not LAMB
        return FusedBinding if is_elementwise else OptimizerBinding
    if algorithm in ALGORITHMS:
        return FusedBinding
    if masters.format.master is Master.STOCHASTIC:
        # Stochastic rounding draws numbers for each parameter: on the device only the fused step
        # can.
        return OptimizerBinding
    if algorithm is torch.optim.Muon:
        return MuonBinding
    return CapturableBinding if algorithm in CAPTURABLE else OptimizerBinding


def refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` for an optimizer that steps another one.

    The inner optimizer would update the 16-bit parameters without their master weights.
    """
    inner = inner_optimizers(optimizer)
    if not inner:
        return
    # In nested wrappers only the innermost optimizers update parameters.
    paths = [path for path, wrapped in inner.items() if not inner_optimizers(wrapped)]
    found = " and ".join(f"{path} ({type(inner[path]).__name__})" for path in paths)
    raise UnsupportedError(
        f"{type(optimizer).__name__} steps another optimizer, {found}, which would update the"
        " parameters without the master weights and clipping that decorate adds to step()."
        f" {_remedy(optimizer, paths)}"
    )


def is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's `ZeroRedundancyOptimizer`, refused at every level."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def _remedy(optimizer: torch.optim.Optimizer, paths: list[str]) -> str:
    for base in type(optimizer).__mro__:
        if base.__name__ in _WRAPPERS:
            return _WRAPPERS[base.__name__]
    names = [f"optimizer{path}" for path in paths]
    argument = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    return (
        f"Pass the inner one: mezzo.decorate(model, {argument}, ...), before wrapping it if you"
        " wrap it yourself, and step the wrapper as before. If the wrapper also writes parameters,"
        " as SAM does, keep master='float32': other masters are dropped at every such write. If it"
        " averages parameters, as Lookahead does, use policy 'O1': averages of 16-bit parameters"
        " lose small updates."
    )


def bind_half_parameters(
    optimizer: torch.optim.Optimizer,
    master: Master = Master.FLOAT32,
    *,
    clip_norm: float | None = None,
) -> MasterWeights:
    """Make an optimizer update its 16-bit parameters in float32, with or without master weights.

    Parameters of groups that are added later are included.

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    >>> optimizer = torch.optim.Adam([weight], lr=0.1)
    >>> masters = bind_half_parameters(optimizer, Master.NONE)
    >>> weight.grad = torch.full((1,), 1e-4, dtype=torch.float16)  # its square underflows
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
    """Create masters for 16-bit parameters without one, from their current values."""
    for parameter in parameters(optimizer):
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES and parameter not in masters:
            masters.adopt(typed("Parameter", parameter), parameter.dtype)
            cast_state(optimizer, parameter)


def cast_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Cast the 16-bit states of a parameter to float32, in which it is updated from now on.

    Earlier steps may have created them, or the optimizer's `__init__`.
    """
    state = optimizer.state.get(parameter, {})
    state.update(
        {
            name: cast(value, torch.float32)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES
        }
    )
