"""`scale_loss`: a scaled loss on the way in, unscaled and checked gradients on the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mezzo.compat.apex.amp._amp_state import _amp_state
from mezzo.compat.apex.amp._scaler import LossScaler
from mezzo.compat.apex.amp._stash import Check, stash_of
from mezzo.scaling.backward import apart

Optimizer = torch.optim.Optimizer


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - unused in Apex as well
    delay_unscale: bool = False,  # noqa: FBT001, FBT002 - Apex's call shape
    delay_overflow_check: bool = False,  # noqa: FBT001, FBT002
) -> Iterator[torch.Tensor]:
    """Give the scaled loss to call `backward()` on; afterwards the gradients are unscaled, and `optimizer.step()` is skipped if one is not finite.

    `delay_unscale` leaves them scaled for a later call without it, `delay_overflow_check` leaves the question whether they are finite to the step.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized. Call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler, chosen = _scaler(loss_id), [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if not _amp_state.opt_properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
        yield loss.float()
        return
    stashes = {optimizer: stash_of(optimizer) for optimizer in chosen}
    fresh = [optimizer for optimizer, stash in stashes.items() if not stash.params_have_scaled_gradients]
    scaled = scaler.scale(loss)
    if delay_unscale:
        for optimizer in fresh:
            scaler.scale_up(optimizer)
            stashes[optimizer].params_have_scaled_gradients = True
        yield scaled
        return
    with apart(fresh):
        yield scaled
        flags = [scaler.unscale(optimizer) for optimizer in chosen]
    # The pass is good or bad as a whole, for all of its optimizers.
    check = Check(loss_id, scaler, [flag for some in flags for flag in some])
    for stash in stashes.values():
        stash.params_have_scaled_gradients = False
        if delay_overflow_check or check.bad:
            stash.checks.append(check)


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(f"loss_id={loss_id}: amp.initialize was called with num_losses={len(scalers)}. Pass num_losses={max(loss_id, 0) + 1} or more there.")
    return scalers[loss_id]
