"""The loss scale of a running scaler, on the host or on a device.

Both do the transitions of `next_state`. On a CPU the scale is a Python value that is mirrored to
tensors. On other devices it consists of tensors that are updated without a synchronization, by one
Triton kernel or a few ops of torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from mezzo import _launch
from mezzo._errors import ScalerError
from mezzo._torch import update_scale_
from mezzo.scaling.scale_state import ScaleRule, ScaleState, is_scale, next_state


class LossScale(Protocol):
    """The scale of one loss, with its growth tracker and counters."""

    scale: torch.Tensor
    """The scale, on its device."""

    @property
    def growth_tracker(self) -> torch.Tensor:
        """Successful steps in a row, on the device."""

    def read(self) -> ScaleState:
        """Return the state as a value. This synchronizes, unless the scale is on a CPU."""

    def load(self, state: ScaleState) -> None:
        """Set the state. The tensors stay the same objects: captured graphs read them."""

    def advance(self, found_inf: torch.Tensor, rule: ScaleRule) -> None:
        """Adapt the scale to one step; `found_inf` is 0 if its gradients were finite, else 1."""

    def set(self, scale: float | torch.Tensor, rule: ScaleRule) -> None:
        """Set the scale, clamped to the floor and the ceiling of the rule."""

    def inverse(self) -> torch.Tensor:
        """Return the factor that unscales gradients.

        Rounded once from float64, since some devices divide float32 less exactly.
        """


def loss_scale_on(device: torch.device, state: ScaleState) -> LossScale:
    """Create a loss scale on a device."""
    return DeviceLossScale(state, device) if _launch.needs_sync(device) else HostLossScale(state)


class HostLossScale:
    """A loss scale on a CPU: a `ScaleState`, mirrored to tensors."""

    def __init__(self, state: ScaleState) -> None:
        self._state = state
        self._uncounted = 0
        """Successful steps that are not in `_state` yet and change only its counters: a new value
        for each would take a third of an update."""
        self.scale = torch.tensor(state.scale, dtype=torch.float32)
        self._tracker: torch.Tensor | None = None
        self._inverse = (0.0, self.scale)

    @property
    def growth_tracker(self) -> torch.Tensor:
        """Successful steps in a row. The tensor is created, and updated, from the first read on."""
        if self._tracker is None:
            self._tracker = torch.tensor(self.latest.growth_tracker, dtype=torch.int32)
        return self._tracker

    @property
    def latest(self) -> ScaleState:
        """The state after the last transition, without values written to the tensors since."""
        if self._uncounted:
            state, count, self._uncounted = self._state, self._uncounted, 0
            self._state = replace(
                state,
                growth_tracker=state.growth_tracker + count,
                good_steps=state.good_steps + count,
            )
        return self._state

    @property
    def has_skips(self) -> bool:
        """Whether the last step was skipped."""
        return self._state.consecutive_skips > 0

    def counters(self) -> tuple[float, int, int]:
        """Return the scale, skipped steps and consecutive skips; uncounted steps do not matter."""
        return self.scale.item(), self._state.skipped_steps, self._state.consecutive_skips

    def read(self) -> ScaleState:
        """Return the state, with values that users wrote to the tensors."""
        state, scale = self.latest, self.scale.item()
        tracker = state.growth_tracker if self._tracker is None else int(self._tracker.item())
        if scale != state.scale or tracker != state.growth_tracker:
            self._state = state = replace(state, scale=scale, growth_tracker=tracker)
        return state

    def load(self, state: ScaleState) -> None:
        """Set the state."""
        self._store(state)

    def advance(self, found_inf: torch.Tensor, rule: ScaleRule) -> None:
        """Adapt the scale to one step."""
        is_nonfinite = bool(found_inf)
        if is_nonfinite or not self._only_counts(rule):
            self._store(next_state(self.read(), rule, found_nonfinite=is_nonfinite))
        else:
            self._uncounted += 1

    def _only_counts(self, rule: ScaleRule) -> bool:
        """Return whether a successful step changes nothing but its counters."""
        state = self._state
        plain = (
            self._tracker is None
            and rule.dynamic
            and not rule.warmup_steps
            and not state.backoff_tracker
            and not state.consecutive_skips
        )
        return (
            plain
            and state.growth_tracker + self._uncounted + 1 < rule.growth_interval
            and self.scale.item() == state.scale
        )

    def set(self, scale: float | torch.Tensor, rule: ScaleRule) -> None:
        """Set the scale, clamped to the floor and the ceiling of the rule."""
        value = float(scale)
        if not is_scale(value):
            raise ScalerError(_invalid_scale(value))
        self._store(replace(self.read(), scale=rule.clamp(value)))

    def inverse(self) -> torch.Tensor:
        """Return one over the scale, cached until the scale changes."""
        scale = self.scale.item()
        if self._inverse[0] != scale:
            self._inverse = (scale, torch.tensor(1.0 / scale, dtype=torch.float32))
        return self._inverse[1]

    def _store(self, state: ScaleState) -> None:
        if state.scale != self._state.scale:
            self.scale.fill_(state.scale)
        if self._tracker is not None:
            self._tracker.fill_(state.growth_tracker)
        self._state, self._uncounted = state, 0


class DeviceLossScale:
    """A loss scale on another device: tensors of one element, which are updated but never read."""

    def __init__(self, state: ScaleState, device: torch.device) -> None:
        # One buffer, so that one copy moves all of it. float32 counts exactly up to 2**24.
        self.counters = torch.zeros(4, dtype=torch.float32, device=device)
        """Scale, skipped steps, consecutive skips, backoff tracker."""
        self.scale, _, self.consecutive_skips, self._backoff = self.counters.unbind()
        self._skips = self.counters[1:3]
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.steps = 0
        """Number of steps, counted on the host without reading the device."""
        self._has_kernel = _launch.has_triton(device)
        self._rule: tuple[ScaleRule, torch.Tensor] | None = None
        """The last rule, and its numbers on the device; kept because captured graphs read them."""
        self._interval = 0
        self.load(state)

    @property
    def growth_tracker(self) -> torch.Tensor:
        """Successful steps in a row, on the device."""
        return self._tracker

    def load(self, state: ScaleState) -> None:
        """Set the state."""
        self.counters.copy_(
            torch.tensor(
                [state.scale, state.skipped_steps, state.consecutive_skips, state.backoff_tracker],
                dtype=torch.float32,
            )
        )
        self._tracker.fill_(state.growth_tracker)
        self.steps = state.good_steps + state.skipped_steps
        self._interval = 0

    def read(self) -> ScaleState:
        """Return the state as a value. This synchronizes."""
        scale, skipped, consecutive_skips, backoff_tracker = self.counters.tolist()
        return ScaleState(
            scale,
            int(self._tracker.item()),
            int(backoff_tracker),
            self.steps - int(skipped),
            int(skipped),
            int(consecutive_skips),
        )

    def advance(self, found_inf: torch.Tensor, rule: ScaleRule) -> None:
        """Adapt the scale to one step. Does not synchronize."""
        changes = rule.dynamic and self.steps >= rule.warmup_steps
        # A captured step does not run now: its replays are counted.
        self.steps += not _launch.is_capturing(self.scale.device)
        if self._has_kernel:
            self._advance_in_one_launch(found_inf, rule, changes=changes)
            return
        self._skips.add_(found_inf)
        self.consecutive_skips.mul_(found_inf)
        if changes:
            self._change(found_inf, rule)

    def count_replay(self) -> int:
        """Count a replayed step; return the number of steps."""
        self.steps += 1
        return self.steps

    def set(self, scale: float | torch.Tensor, rule: ScaleRule) -> None:
        """Set the scale, clamped to the floor and the ceiling of the rule.

        A tensor is not read, so that this does not synchronize: NaN in it becomes the floor.
        """
        if isinstance(scale, torch.Tensor):
            new = scale.detach().reshape(()).to(self.scale.device, non_blocking=True)
            self.scale.copy_(
                new.nan_to_num(nan=rule.min_scale).clamp(rule.min_scale, rule.max_scale)
            )
        elif is_scale(scale):
            self.scale.fill_(rule.clamp(scale))
        else:
            raise ScalerError(_invalid_scale(scale))

    def inverse(self) -> torch.Tensor:
        """Return one over the scale."""
        return (
            self.scale.reciprocal()
            if self.scale.device.type == "mps"
            else self.scale.double().reciprocal_().float()
        )

    def _advance_in_one_launch(
        self, found_inf: torch.Tensor, rule: ScaleRule, *, changes: bool
    ) -> None:
        # Triton is optional, and slow to import.
        from mezzo.scaling.triton_kernels import advance_kernel  # noqa: PLC0415

        device = self.scale.device
        # An equal rule is no reason to write the table anew: a capture does not notice it.
        if self._rule is None or (self._rule[0] is not rule and self._rule[0] != rule):
            numbers = (
                rule.growth_factor,
                rule.backoff_factor,
                rule.min_scale,
                rule.max_scale,
                rule.growth_interval,
                rule.backoff_interval,
                rule.consecutive_backoff,
            )
            self._rule = rule, _launch.table_on(device, torch.tensor(numbers, dtype=torch.float64))
        with _launch.device_guard(device):
            _launch.run_kernel(
                advance_kernel,
                1,
                (self.counters, self._tracker, found_inf, self._rule[1]),
                (changes,),
                device,
            )

    def _change(self, found_inf: torch.Tensor, rule: ScaleRule) -> None:
        """Change the scale with torch's kernel, which has no bounds, or with a few ops."""
        if rule.backoff_interval != 1 or rule.growth_interval == 0 or update_scale_ is None:
            self._change_in_ops(found_inf != 0, rule)
        else:
            if rule.growth_interval != self._interval:
                # torch's kernel compares with ==, and would never grow a scale whose tracker is
                # past a shortened interval.
                self._tracker.clamp_(max=rule.growth_interval - 1)
                self._interval = rule.growth_interval
            update_scale_(
                self.scale,
                self._tracker,
                found_inf,
                rule.growth_factor,
                rule.backoff_factor,
                rule.growth_interval,
            )
        self.scale.clamp_(rule.min_scale, rule.max_scale)

    def _change_in_ops(self, is_nonfinite: torch.Tensor, rule: ScaleRule) -> None:
        never, zero = torch.zeros_like(is_nonfinite), torch.zeros_like(self._backoff)
        after_good = zero if rule.consecutive_backoff else self._backoff
        skips = torch.where(is_nonfinite, self._backoff + 1, after_good)
        backs_off = (
            is_nonfinite & (skips >= rule.backoff_interval) if rule.backoff_interval else never
        )
        good = torch.where(is_nonfinite, torch.zeros_like(self._tracker), self._tracker + 1)
        grows = (good >= rule.growth_interval) & ~is_nonfinite if rule.growth_interval else never
        # In float64 and rounded once, as in `next_state`.
        wide = self.scale if self.scale.device.type == "mps" else self.scale.double()
        grown = torch.where(grows, wide * rule.growth_factor, wide)
        changed = torch.where(backs_off, wide * rule.backoff_factor, grown).float()
        self.scale.copy_(torch.where(changed.isfinite(), changed, self.scale))
        self._tracker.copy_(torch.where(grows, torch.zeros_like(good), good))
        left = 0 if rule.consecutive_backoff else max(rule.backoff_interval - 1, 0)
        after_backoff = torch.full_like(skips, left)
        self._backoff.copy_(torch.where(backs_off, after_backoff, torch.where(grows, zero, skips)))


def _invalid_scale(scale: float) -> str:
    return f"update(new_scale={scale!r}): a scale is a positive finite number, such as 65536.0."
