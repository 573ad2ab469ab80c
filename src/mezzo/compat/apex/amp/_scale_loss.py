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
            "amp.scale_loss was called, but amp has not been initialized, so there is no loss scale. "
            "Call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler, chosen = _scaler(loss_id), [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if scaler.is_idle and not _amp_state.opt_properties.master_weights:
        yield loss.float()
    elif delay_unscale:
        yield _left_scaled(scaler, chosen, loss)
    else:
        with _unscaled_after(scaler, chosen, loss) as (scaled, flags):
            yield scaled
        _judge(chosen, Check(loss_id, scaler, flags), delayed=delay_overflow_check)
    if _amp_state.handle is not None:
        _amp_state.handle._clear_cache()


def _left_scaled(scaler: LossScaler, optimizers: list[Optimizer], loss: torch.Tensor) -> torch.Tensor:
    """Scaled gradients are going to be added to what is there, which is therefore scaled too."""
    scaled = scaler.scale(loss)
    for optimizer in optimizers:
        stash = stash_of(optimizer)
        if not stash.params_have_scaled_gradients:
            scaler.scale_up(optimizer)
            stash.params_have_scaled_gradients = True
    return scaled


@contextmanager
def _unscaled_after(scaler: LossScaler, optimizers: list[Optimizer], loss: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """The scaled loss, and a list that holds the flags of its gradients at the end. Gradients that are there and unscaled are kept apart meanwhile."""
    flags: list[torch.Tensor] = []
    with apart([optimizer for optimizer in optimizers if not stash_of(optimizer).params_have_scaled_gradients]):
        yield scaler.scale(loss), flags
        for optimizer in optimizers:
            flags += scaler.unscale(optimizer)
            stash_of(optimizer).params_have_scaled_gradients = False


def _judge(optimizers: list[Optimizer], check: Check, *, delayed: bool) -> None:
    """Tell the optimizers of a backward pass whether it was bad. It is good or bad as a whole, for all of them."""
    if delayed or check.bad:
        for optimizer in optimizers:
            stash_of(optimizer).checks.append(check)


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(f"loss_id={loss_id}: amp.initialize was called with num_losses={len(scalers)}. Pass num_losses={max(loss_id, 0) + 1} or more there.")
    return scalers[loss_id]
