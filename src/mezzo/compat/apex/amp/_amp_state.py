"""What Apex's amp keeps for the whole process, where Apex's users look for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from mezzo.optim.bound import bound_of
from mezzo.optim.masters import Masters

if TYPE_CHECKING:
    from mezzo.compat.apex.amp._casts import Handle
    from mezzo.compat.apex.amp._properties import Properties
    from mezzo.compat.apex.amp._scaler import LossScaler


class AmpState:
    """The state of amp; `opt_properties` is there once `initialize` was called. It holds no model and no optimizer, so that none is kept alive by it."""

    opt_properties: Properties
    loss_scalers: list[LossScaler]
    handle: Handle | None

    def __init__(self) -> None:
        self.hard_override = False
        """Whether what is refused is only printed."""
        self.allow_incoming_model_not_fp32 = False
        """Whether models may come in 16 bits."""
        self.verbosity = 1
        """0 prints nothing."""
        self.loss_scalers = []
        self.handle = None
        """The casts of O1, while they are on."""


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Refuse, or only say so where somebody has overridden that."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)  # noqa: T201 - as Apex tells it


def maybe_print(message: str, rank0: bool = False) -> None:  # noqa: FBT001, FBT002 - Apex's call shape
    """Print unless `verbosity` is 0; of several processes only the first, where `rank0` says so."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (rank0 and distributed and torch.distributed.get_rank() > 0):
        print(message)  # noqa: T201 - Apex's users know these lines


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The float32 parameters that an optimizer updates, with unscaled gradients after `scale_loss`: what to clip.

    Where parameters are 16-bit they share memory with the exact weights, and their gradients are those of the parameters: read the one and clip the other. What is
    written to their values is not taken over.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [parameter is weight for parameter in master_params(torch.optim.SGD([weight], lr=0.1))]
    [True]
    """
    bound = bound_of(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter if bound is None or parameter not in bound.masters else _stand_in(parameter, bound.masters)


def _stand_in(parameter: torch.Tensor, masters: Masters) -> torch.Tensor:
    beside = masters.beside(parameter)
    if beside is None:
        return parameter
    value = masters.read(parameter) if masters.follow(parameter) else beside
    stand_in = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    stand_in.grad_dtype = None
    stand_in.grad = parameter.grad
    return stand_in
