"""What amp keeps on an optimizer, and the step that heeds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from mezzo.compat.apex.amp._amp_state import maybe_print
from mezzo.compat.apex.amp._casts import disable_casts
from mezzo.compat.apex.amp._scaler import LossScaler
from mezzo.optim.bound import replace_step


class Check:
    """One backward pass: whether its gradients are finite is asked once, whoever of its optimizers asks first."""

    def __init__(self, loss_id: int, scaler: LossScaler, flags: list[torch.Tensor]) -> None:
        self._loss_id, self._scaler, self._flags = loss_id, scaler, flags

    @cached_property
    def bad(self) -> bool:
        """Whether a gradient was not finite; the scale adapts when this is asked."""
        return self._scaler.update_scale(self._flags)

    def __str__(self) -> str:
        how = "reducing loss scale to" if self._scaler.dynamic else "keeping its loss scale of"
        return f"Gradient overflow.  Skipping step, loss scaler {self._loss_id} {how} {self._scaler.loss_scale()}"


class AmpStash:
    """What `scale_loss` tells an optimizer's step."""

    def __init__(self, *, masters: bool) -> None:
        self.masters = masters
        self.params_have_scaled_gradients = False
        """Whether the gradients wait for a later `scale_loss` to unscale them."""
        self.checks: list[Check] = []
        """Backward passes since the last step that were bad, or were not asked yet."""

    @property
    def already_patched(self) -> bool:
        """Whether the next step is skipped."""
        return any(check.bad for check in self.checks)

    def take(self) -> list[Check]:
        """The reasons to skip this step; the next one starts anew."""
        # All are asked, for the scale adapts by it.
        bad, self.checks = [check for check in self.checks if check.bad], []
        return bad


def attach(optimizer: torch.optim.Optimizer, *, masters: bool) -> None:
    """Let an optimizer's step be skipped where `scale_loss` found gradients that are not finite, and run without the casts of O1."""
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("An optimizer goes through amp.initialize once, and this one did before. Make a new one for another initialize.")
    stash, own = AmpStash(masters=masters), optimizer.step

    def step(_self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        reasons = stash.take()
        if closure is not None:
            if masters or reasons:
                raise RuntimeError(
                    "amp does not support closures with master weights, nor on a step that is to be skipped. Compute the loss and its gradients first, then call step()."
                )
            return own(closure)
        if reasons:
            for reason in reasons:
                maybe_print(str(reason))
            return None
        with disable_casts():
            return own()

    replace_step(optimizer, step)
    optimizer._amp_stash = stash  # type: ignore[attr-defined]


def stash_of(optimizer: object) -> AmpStash:
    """What `attach` left on an optimizer."""
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, AmpStash):
        raise RuntimeError(  # noqa: TRY004 - a mistake of order, not of type
            f"amp.scale_loss was given {type(optimizer).__name__}, which did not go through amp.initialize. "
            "Pass the optimizers that amp.initialize returned: model, optimizer = amp.initialize(model, optimizer, opt_level=...)."
        )
    return stash
