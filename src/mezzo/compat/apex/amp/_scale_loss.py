"""`apex.amp.scale_loss`, Apex's `LossScaler`, and the state they keep on an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from mezzo.compat.apex.amp._amp_state import _amp_state, maybe_print
from mezzo.compat.apex.amp._casts import disable_casts
from mezzo.optim.binding import replace_step
from mezzo.scaling.diagnostics import CollapseMonitor
from mezzo.scaling.gradients import Flags, check_sorted, isolated_gradients, parameters
from mezzo.scaling.loss_scales import LossScales, binding_of, first_states
from mezzo.scaling.mesh import mesh_of
from mezzo.scaling.scale_state import LARGEST, OnCollapse, ScaleRule
from mezzo.scaling.step_result import NO_SOURCE

Optimizer = torch.optim.Optimizer

_COLLAPSE_PATIENCE = 50
_DEFAULT_MIN_SCALE = ScaleRule().min_scale


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss for `backward()`, then unscale and check the gradients.

    If one is non-finite, the next `optimizer.step()` is skipped. `delay_unscale` leaves the
    gradients scaled until a later call without it. `delay_overflow_check` reads the result of the
    check in `optimizer.step()`; without it, leaving the context synchronizes.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss was called, but amp has not been initialized, so there is no loss"
            " scale. Call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler = _scaler(loss_id)
    optimizers = _optimizer_list(optimizers)
    _check_loss(loss)
    if scaler.is_noop and not _amp_state.opt_properties.master_weights:
        yield loss.float()
    elif delay_unscale:
        yield _scale_and_delay_unscale(scaler, optimizers, loss)
    else:
        with _scale_then_unscale(scaler, optimizers, loss) as (scaled, flags):
            yield scaled
        _record_check(
            optimizers, OverflowCheck(loss_id, scaler, flags), delayed=delay_overflow_check
        )
    if _amp_state.handle is not None:
        _amp_state.handle._clear_cache()


def _optimizer_list(optimizers: Any) -> list[Optimizer]:
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    if isinstance(optimizers, torch.nn.Module) or not isinstance(optimizers, Iterable):
        raise TypeError(
            "amp.scale_loss(loss, optimizers) takes an optimizer or a list of optimizers, got"
            f" {type(optimizers).__name__}. Pass the optimizer that amp.initialize returned."
        )
    return list(optimizers)


def _check_loss(loss: Any) -> None:
    """Raise for a loss whose `backward()` would fail with an error that does not name it."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"amp.scale_loss(loss, optimizers) takes a tensor, got {type(loss).__name__}. Pass the"
            " loss itself, and call it once for each of several losses, with loss_id=."
        )
    if not loss.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "The loss passed to amp.scale_loss does not depend on any trained parameter. Compute it"
            " from the model's output, without detach() or no_grad()."
        )


def _scale_and_delay_unscale(
    scaler: LossScaler, optimizers: list[Optimizer], loss: torch.Tensor
) -> torch.Tensor:
    """Return the scaled loss; scale existing gradients too, since scaled ones are added to them."""
    scaled = scaler.scale(loss)
    for optimizer in optimizers:
        stash = amp_stash(optimizer)
        if not stash.params_have_scaled_gradients:
            scaler.scale_gradients(optimizer)
            stash.note_gradients(scaled=True)
    return scaled


@contextmanager
def _scale_then_unscale(
    scaler: LossScaler, optimizers: list[Optimizer], loss: torch.Tensor
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield the scaled loss and a list that receives the `found_inf` flags on exit.

    Existing unscaled gradients are set aside during the backward pass and added afterwards.
    """
    flags: list[torch.Tensor] = []
    unscaled = [
        optimizer
        for optimizer in optimizers
        if not amp_stash(optimizer).params_have_scaled_gradients
    ]
    with isolated_gradients(unscaled):
        yield scaler.scale(loss), flags
        for optimizer in optimizers:
            flags += scaler.unscale(optimizer)
            amp_stash(optimizer).note_gradients(scaled=False)


def _record_check(optimizers: list[Optimizer], check: OverflowCheck, *, delayed: bool) -> None:
    """Add the check to all optimizers of a backward pass: an overflow skips the steps of all."""
    if delayed or check.found_overflow:
        for optimizer in optimizers:
            amp_stash(optimizer).checks.append(check)


def _scaler(loss_id: int) -> LossScaler:
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"loss_id={loss_id} is out of range: amp.initialize was called with"
            f" num_losses={len(scalers)}. Pass num_losses={max(loss_id, 0) + 1} or more there."
        )
    return scalers[loss_id]


class LossScaler:
    """`apex.amp.scaler.LossScaler`: one loss scale, dynamic or static.

    Differs from Apex: a static scale also skips steps with non-finite gradients, which Apex writes
    into the weights, and a dynamic scale never reaches 0.

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
                min_scale=min_loss_scale or _DEFAULT_MIN_SCALE,
                max_scale=min(max_loss_scale, LARGEST),
            )
        else:
            rule = ScaleRule(dynamic=False)
        start = init_scale if self.dynamic else float(loss_scale)
        self._scales = LossScales(
            rule,
            first_states(rule, start, 1),
            [CollapseMonitor(_COLLAPSE_PATIENCE, OnCollapse.WARN)],
        )
        self._last_set_scale = start
        """The scale set last. A static scale keeps this value, so it is known without
        synchronizing."""

    def loss_scale(self) -> float:
        """Return the loss scale. This synchronizes."""
        return self._loss_scale

    @property
    def is_noop(self) -> bool:
        """Whether the scale is 1 and static."""
        return not self.dynamic and self._last_set_scale == 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss in float32 times the loss scale. Does not synchronize."""
        scale = self._scales.make(loss.device, 0).scale
        return loss.float() * scale.to(loss.device, non_blocking=loss.device.type != "cpu")

    def scale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply existing gradients by the scale, so that scaled ones can be added to them."""
        scale = self._scales.of(0).scale
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale.to(parameter.grad.device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Unscale an optimizer's gradients, 16-bit ones in float32, and return `found_inf` flags.

        Does not synchronize: the flags are device tensors.
        """
        binding, flags = binding_of(optimizer), Flags()
        if binding is not None:
            binding.widen_gradients()
        mesh = mesh_of(parameters(optimizer)) if binding is None else binding.mesh
        check_sorted(optimizer, self._scales.of(0).inverse(), flags, mesh=mesh)
        return list(flags.values())

    def update_scale(self, flags: list[torch.Tensor]) -> bool:
        """Update the scale after one backward pass; return whether it overflowed. Synchronizes."""
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
        self._last_set_scale = self._scales.rule.clamp(float(scale))
        self._scales.load(
            [replace(self._scales.state(0), scale=self._last_set_scale)], self._scales.rule
        )

    def load(self, scale: float, unskipped: int) -> None:
        """Load the scale and the successful steps in a row."""
        self._loss_scale, self._unskipped = scale, unskipped

    @property
    def _unskipped(self) -> int:
        return self._scales.state(0).growth_tracker

    @_unskipped.setter
    def _unskipped(self, count: int) -> None:
        self._scales.load(
            [replace(self._scales.state(0), growth_tracker=int(count))], self._scales.rule
        )

    # NVIDIA's examples set these three: `initialize` takes no interval.

    @property
    def _scale_seq_len(self) -> int:
        return self._scales.rule.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, steps: int) -> None:
        self._change_rule(growth_interval=int(steps))

    @property
    def _min_loss_scale(self) -> float:
        return self._scales.rule.min_scale

    @_min_loss_scale.setter
    def _min_loss_scale(self, scale: float | None) -> None:
        self._change_rule(min_scale=_DEFAULT_MIN_SCALE if scale is None else float(scale))

    @property
    def _max_loss_scale(self) -> float:
        return self._scales.rule.max_scale

    @_max_loss_scale.setter
    def _max_loss_scale(self, scale: float) -> None:
        self._change_rule(max_scale=min(float(scale), LARGEST))

    def _change_rule(self, **fields: Any) -> None:
        self._scales.load([self._scales.state(0)], replace(self._scales.rule, **fields))


class OverflowCheck:
    """Overflow check of one backward pass, evaluated once for all its optimizers."""

    def __init__(self, loss_id: int, scaler: LossScaler, flags: list[torch.Tensor]) -> None:
        self._loss_id, self._scaler, self._flags = loss_id, scaler, flags

    @cached_property
    def found_overflow(self) -> bool:
        """Whether a gradient is non-finite. The first read synchronizes and updates the scale."""
        return self._scaler.update_scale(self._flags)

    def __str__(self) -> str:
        action = "reducing loss scale to" if self._scaler.dynamic else "keeping its loss scale of"
        return (
            f"Gradient overflow.  Skipping step, loss scaler {self._loss_id} {action}"
            f" {self._scaler.loss_scale()}"
        )


class AmpStash:
    """State that `scale_loss` leaves on an optimizer for its next step."""

    def __init__(self, *, masters: bool) -> None:
        self.masters = masters
        self.params_have_scaled_gradients = False
        """Whether the gradients are still scaled, until a later `scale_loss` unscales them."""
        self.checks: list[OverflowCheck] = []
        """Checks since the last step that overflowed or are not evaluated yet."""

    def note_gradients(self, *, scaled: bool) -> None:
        """Note whether the gradients are scaled."""
        self.params_have_scaled_gradients = scaled

    @property
    def already_patched(self) -> bool:
        """Whether the next step is skipped."""
        return any(check.found_overflow for check in self.checks)

    def pop_overflows(self) -> list[OverflowCheck]:
        """Return the checks that overflowed, and clear all."""
        # Every check is evaluated, not only up to the first overflow: that updates its scale.
        overflows = [check for check in self.checks if check.found_overflow]
        self.checks = []
        return overflows


def attach_amp_stash(optimizer: torch.optim.Optimizer, *, masters: bool) -> None:
    """Replace an optimizer's step: skip it after an overflow, and run it without O1's casts."""
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            "This optimizer was already passed to amp.initialize, which accepts an optimizer once."
            " Create a new optimizer."
        )
    stash, original_step = AmpStash(masters=masters), optimizer.step

    def step(_self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        overflows = stash.pop_overflows()
        if closure is not None:
            if masters or overflows:
                raise RuntimeError(
                    "amp does not support closures with master weights or for a skipped step."
                    " Compute the loss and its gradients first, then call step()."
                )
            return original_step(closure)
        if overflows:
            for check in overflows:
                maybe_print(str(check))
            return None
        with disable_casts():
            return original_step()

    replace_step(optimizer, step)
    optimizer._amp_stash = stash  # type: ignore[attr-defined]


def amp_stash(optimizer: object) -> AmpStash:
    """Return the state that `attach_amp_stash` put on an optimizer."""
    stash = getattr(optimizer, "_amp_stash", None)
    if not isinstance(stash, AmpStash):
        raise RuntimeError(
            f"amp.scale_loss got {type(optimizer).__name__}, which was not passed to"
            " amp.initialize. Pass the optimizers that amp.initialize returned: model, optimizer ="
            " amp.initialize(model, optimizer, opt_level=...)."
        )
    return stash
