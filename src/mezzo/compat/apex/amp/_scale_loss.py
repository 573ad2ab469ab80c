"""`amp.scale_loss`, Apex's loss scaler, and what it attaches to an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from mezzo.compat.apex.amp._amp_state import _amp_state, maybe_print
from mezzo.compat.apex.amp._casts import disable_casts
from mezzo.optim.binding import replace_step
from mezzo.scaling.diagnostics import CollapseMonitor
from mezzo.scaling.gradients import Flags, check_sorted, isolated_gradients
from mezzo.scaling.loss_scales import LossScales, binding_of, first_states
from mezzo.scaling.scale_state import LARGEST, OnCollapse, ScaleRule
from mezzo.scaling.step_result import NO_SOURCE

_PATIENCE = 50
_FLOOR = ScaleRule().min_scale


class LossScaler:
    """A loss scale, dynamic or not. A static one skips bad steps as well, which Apex's writes into the weights; and a scale never falls to 0.

    >>> LossScaler("dynamic").loss_scale(), LossScaler(128.0).loss_scale()
    (65536.0, 128.0)
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if self.dynamic:
            rule = ScaleRule(
                scale_factor,
                1.0 / scale_factor,
                scale_window,
                min_scale=min_loss_scale or _FLOOR,
                max_scale=min(max_loss_scale, LARGEST),
            )
        else:
            rule = ScaleRule(dynamic=False)
        start = init_scale if self.dynamic else float(loss_scale)
        self._scales = LossScales(
            rule, first_states(rule, start, 1), [CollapseMonitor(_PATIENCE, OnCollapse.WARN)]
        )
        self._set = start
        """The scale that was set last: a static one stays there, and is known without asking the
        device."""

    def loss_scale(self) -> float:
        """The scale; this waits for the device."""
        return self._loss_scale

    @property
    def is_idle(self) -> bool:
        """Whether it multiplies by one, and always will."""
        return not self.dynamic and self._set == 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss in float32, so many times as large."""
        scale = self._scales.make(loss.device, 0).scale
        return loss.float() * scale.to(loss.device, non_blocking=loss.device.type != "cpu")

    def scale_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply gradients that are there by the scale, for scaled ones are going to be added to them."""
        scale = self._scales.of(0).scale
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.to(parameter.grad.device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Divide an optimizer's gradients by the scale, 16-bit ones as float32; the flags that say whether they are finite, which nobody has read."""
        bound, flags = binding_of(optimizer), Flags()
        if bound is not None:
            bound.widen_gradients()
        check_sorted(optimizer, self._scales.of(0).inverse(), flags)
        return list(flags.values())

    def update_scale(self, flags: list[torch.Tensor]) -> bool:
        """Adapt the scale to the flags of one backward pass, and say whether a gradient was not finite; this waits for the device."""
        if not flags:
            return False
        self._scales.make(flags[0].device, 0)
        self._scales.advance(0, flags, NO_SOURCE)
        return any(bool(flag) for flag in flags)

    @property
    def _loss_scale(self) -> float:
        return self._scales.state(0).scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._set = self._scales.rule.clamp(float(scale))
        self._scales.load([replace(self._scales.state(0), scale=self._set)], self._scales.rule)

    @property
    def _unskipped(self) -> int:
        return self._scales.state(0).growth_tracker

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        self._scales.load(
            [replace(self._scales.state(0), growth_tracker=int(count))], self._scales.rule
        )


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
        return (
            f"Gradient overflow.  Skipping step, loss scaler {self._loss_id} {how}"
            f" {self._scaler.loss_scale()}"
        )


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
        raise RuntimeError(
            "An optimizer goes through amp.initialize once, and this one did before. Make a new one"
            " for another initialize."
        )
    stash, own = AmpStash(masters=masters), optimizer.step

    def step(_self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        reasons = stash.take()
        if closure is not None:
            if masters or reasons:
                raise RuntimeError(
                    "amp does not support closures with master weights, nor on a step that is to be"
                    " skipped. Compute the loss and its gradients first, then call step()."
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
        raise RuntimeError(
            f"amp.scale_loss was given {type(optimizer).__name__}, which did not go through"
            " amp.initialize. Pass the optimizers that amp.initialize returned: model, optimizer ="
            " amp.initialize(model, optimizer, opt_level=...)."
        )
    return stash


Optimizer = torch.optim.Optimizer


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Give the scaled loss to call `backward()` on; afterwards the gradients are unscaled, and `optimizer.step()` is skipped if one is not finite.

    `delay_unscale` leaves them scaled for a later call without it, `delay_overflow_check` leaves
    the question whether they are finite to the step.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss was called, but amp has not been initialized, so there is no loss"
            " scale. Call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler, chosen = (
        _scaler(loss_id),
        ([optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)),
    )
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


def _left_scaled(
    scaler: LossScaler, optimizers: list[Optimizer], loss: torch.Tensor
) -> torch.Tensor:
    """Scaled gradients are going to be added to what is there, which is therefore scaled too."""
    scaled = scaler.scale(loss)
    for optimizer in optimizers:
        stash = stash_of(optimizer)
        if not stash.params_have_scaled_gradients:
            scaler.scale_up(optimizer)
            stash.params_have_scaled_gradients = True
    return scaled


@contextmanager
def _unscaled_after(
    scaler: LossScaler, optimizers: list[Optimizer], loss: torch.Tensor
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """The scaled loss, and a list that holds the flags of its gradients at the end. Gradients that are there and unscaled are kept apart meanwhile."""
    flags: list[torch.Tensor] = []
    with isolated_gradients(
        [
            optimizer
            for optimizer in optimizers
            if not stash_of(optimizer).params_have_scaled_gradients
        ]
    ):
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
        raise IndexError(
            f"loss_id={loss_id}: amp.initialize was called with num_losses={len(scalers)}. Pass"
            f" num_losses={max(loss_id, 0) + 1} or more there."
        )
    return scalers[loss_id]
