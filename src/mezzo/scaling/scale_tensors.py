"""A scale that lives on a device: the same transitions as `next_state`, carried out without asking the device anything.

On a CPU there is nothing to wait for, so the value itself is kept and only mirrored. Elsewhere one
kernel of our own does it, or a handful of torch's.
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
        """Good steps in a row, on the device."""

    def read(self) -> ScaleState:
        """The state as a value; this may wait for the device."""

    def load(self, state: ScaleState) -> None:
        """Take over a state; the tensors stay the same objects, for captured programs hold them."""

    def advance(self, found: torch.Tensor, rule: ScaleRule) -> None:
        """Take the step into account whose flag this is: 0 for finite gradients, 1 otherwise."""

    def set(self, scale: float | torch.Tensor, rule: ScaleRule) -> None:
        """Set the scale by hand, within the floor and the ceiling."""

    def inverse(self) -> torch.Tensor:
        """What gradients are multiplied by: rounded once from float64, since some devices divide float32 less exactly."""


def loss_scale_on(device: torch.device, state: ScaleState) -> LossScale:
    """A scale on a device."""
    return DeviceLossScale(state, device) if _launch.needs_sync(device) else HostLossScale(state)


class HostLossScale:
    """A scale on a CPU: the value is the truth, and the tensors show it."""

    def __init__(self, state: ScaleState) -> None:
        self._state = state
        self._quiet = 0
        """Good steps since then that changed nothing but the counts: a value for each would take
        a third of an update."""
        self.scale = torch.tensor(state.scale, dtype=torch.float32)
        self._tracker: torch.Tensor | None = None
        self._inverse = (0.0, self.scale)

    @property
    def growth_tracker(self) -> torch.Tensor:
        """Good steps in a row; a tensor is made, and kept up, only for whoever asks."""
        if self._tracker is None:
            self._tracker = torch.tensor(self.latest.growth_tracker, dtype=torch.int32)
        return self._tracker

    @property
    def latest(self) -> ScaleState:
        """The state as of the last transition."""
        if self._quiet:
            state, quiet, self._quiet = self._state, self._quiet, 0
            self._state = replace(
                state,
                growth_tracker=state.growth_tracker + quiet,
                good_steps=state.good_steps + quiet,
            )
        return self._state

    @property
    def has_skips(self) -> bool:
        """Whether the last step was skipped."""
        return self._state.consecutive_skips > 0

    def read(self) -> ScaleState:
        """The state; whoever wrote to the tensors is heard."""
        state, scale = self.latest, self.scale.item()
        good = state.growth_tracker if self._tracker is None else int(self._tracker.item())
        if scale != state.scale or good != state.growth_tracker:
            self._state = state = replace(state, scale=scale, growth_tracker=good)
        return state

    def load(self, state: ScaleState) -> None:
        """Take over a state."""
        self._show(state)

    def advance(self, found: torch.Tensor, rule: ScaleRule) -> None:
        """Advance the value."""
        bad = bool(found)
        if bad or not self._is_quiet(rule):
            self._show(next_state(self.read(), rule, found_nonfinite=bad))
        else:
            self._quiet += 1

    def _is_quiet(self, rule: ScaleRule) -> bool:
        """Whether a good step is one more among others, and nothing else."""
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
            and state.growth_tracker + self._quiet + 1 < rule.growth_interval
            and self.scale.item() == state.scale
        )

    def set(self, scale: float | torch.Tensor, rule: ScaleRule) -> None:
        """Set the scale by hand."""
        value = float(scale)
        if not is_scale(value):
            raise ScalerError(
                f"update(new_scale={value!r}): a scale is a positive finite number, such as"
                " 65536.0."
            )
        self._show(replace(self.read(), scale=rule.clamp(value)))

    def inverse(self) -> torch.Tensor:
        """One over the scale, kept while the scale stays."""
        scale = self.scale.item()
        if self._inverse[0] != scale:
            self._inverse = (scale, torch.tensor(1.0 / scale, dtype=torch.float32))
        return self._inverse[1]

    def _show(self, state: ScaleState) -> None:
        if state.scale != self._state.scale:
            self.scale.fill_(state.scale)
        if self._tracker is not None:
            self._tracker.fill_(state.growth_tracker)
        self._state, self._quiet = state, 0


class DeviceLossScale:
    """A scale elsewhere: the scale, its growth tracker and its counters are tensors of one element each, and nothing is read."""

    def __init__(self, state: ScaleState, device: torch.device) -> None:
        # One buffer, so that one copy brings everything. float32 counts exactly to 2**24.
        self.shown = torch.zeros(4, dtype=torch.float32, device=device)
        """Scale, skipped steps, skipped steps in a row, bad steps that count."""
        self.scale, self.skipped, self.consecutive_skips, self._bad = self.shown.unbind()
        self._skips = self.shown[1:3]
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.steps = 0
        """How many steps were counted: the host knows that without asking."""
        self._in_one_launch = _launch.has_triton(device)
        self._rule: tuple[ScaleRule, torch.Tensor] | None = None
        """The numbers of the last rule as the kernel reads them; held, because captured steps
        read them too."""
        self._interval = 0
        self.load(state)

    @property
    def growth_tracker(self) -> torch.Tensor:
        """Good steps in a row, on the device."""
        return self._tracker

    def load(self, state: ScaleState) -> None:
        """Take over a state."""
        self.shown.copy_(
            torch.tensor(
                [state.scale, state.skipped_steps, state.consecutive_skips, state.backoff_tracker],
                dtype=torch.float32,
            )
        )
        self._tracker.fill_(state.growth_tracker)
        self.steps = state.good_steps + state.skipped_steps
        self._interval = 0

    def read(self) -> ScaleState:
        """The state as a value; this waits for the device."""
        scale, skipped, in_a_row, bad = self.shown.tolist()
        return ScaleState(
            scale,
            int(self._tracker.item()),
            int(bad),
            self.steps - int(skipped),
            int(skipped),
            int(in_a_row),
        )

    def advance(self, found: torch.Tensor, rule: ScaleRule) -> None:
        """Take the step into account whose flag this is: 0 for finite gradients, 1 otherwise."""
        changes = rule.dynamic and self.steps >= rule.warmup_steps
        # What is captured runs at its replays, and is counted there.
        self.steps += not _launch.is_capturing(self.scale.device)
        if self._in_one_launch:
            self._advance_in_one_launch(found, rule, changes=changes)
            return
        self._skips.add_(found)
        self.consecutive_skips.mul_(found)
        if changes:
            self._change(found, rule)

    def set(self, scale: float | torch.Tensor, rule: ScaleRule) -> None:
        """Set the scale by hand, within the floor and the ceiling. What a tensor holds is not looked at: NaN becomes the floor."""
        if isinstance(scale, torch.Tensor):
            given = scale.detach().reshape(()).to(self.scale.device, non_blocking=True)
            self.scale.copy_(
                given.nan_to_num(nan=rule.min_scale).clamp(rule.min_scale, rule.max_scale)
            )
        elif is_scale(scale):
            self.scale.fill_(rule.clamp(scale))
        else:
            raise ScalerError(
                f"update(new_scale={scale!r}): a scale is a positive finite number, such as"
                " 65536.0."
            )

    def inverse(self) -> torch.Tensor:
        """One over the scale."""
        return (
            self.scale.reciprocal()
            if self.scale.device.type == "mps"
            else self.scale.double().reciprocal_().float()
        )

    def _advance_in_one_launch(
        self, found: torch.Tensor, rule: ScaleRule, *, changes: bool
    ) -> None:
        # Triton is optional, and takes a while to import.
        from mezzo.scaling.triton_kernels import advance_kernel  # noqa: PLC0415

        device = self.scale.device
        if self._rule is None or self._rule[0] is not rule:
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
                (self.shown, self._tracker, found, self._rule[1]),
                (changes,),
                device,
            )

    def _change(self, found: torch.Tensor, rule: ScaleRule) -> None:
        if rule.backoff_interval != 1 or rule.growth_interval == 0 or update_scale_ is None:
            self._change_by_hand(found != 0, rule)
        else:
            if rule.growth_interval != self._interval:
                # torch's kernel compares with ==: a tracker that is past a shortened interval would
                # never meet it.
                self._tracker.clamp_(max=rule.growth_interval - 1)
                self._interval = rule.growth_interval
            # One kernel of torch's own is the whole rule but for the bounds.
            update_scale_(
                self.scale,
                self._tracker,
                found,
                rule.growth_factor,
                rule.backoff_factor,
                rule.growth_interval,
            )
        self.scale.clamp_(rule.min_scale, rule.max_scale)

    def _change_by_hand(self, bad: torch.Tensor, rule: ScaleRule) -> None:
        never, good_before = torch.zeros_like(bad), self._tracker
        counted = torch.where(
            bad,
            self._bad + 1,
            torch.zeros_like(self._bad) if rule.consecutive_backoff else self._bad,
        )
        back = bad & (counted >= rule.backoff_interval) if rule.backoff_interval else never
        good = torch.where(bad, torch.zeros_like(good_before), good_before + 1)
        grow = (good >= rule.growth_interval) & ~bad if rule.growth_interval else never
        # In float64, as the value does: one rounding at the end.
        wide = self.scale if self.scale.device.type == "mps" else self.scale.double()
        changed = torch.where(
            back, wide * rule.backoff_factor, torch.where(grow, wide * rule.growth_factor, wide)
        ).float()
        self.scale.copy_(torch.where(changed.isfinite(), changed, self.scale))
        self._tracker.copy_(torch.where(grow, torch.zeros_like(good), good))
        after_back = torch.full_like(
            counted, 0 if rule.consecutive_backoff else max(rule.backoff_interval - 1, 0)
        )
        self._bad.copy_(
            torch.where(back, after_back, torch.where(grow, torch.zeros_like(counted), counted))
        )
