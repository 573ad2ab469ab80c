"""One loss scale per loss, and what is recorded for each optimizer between two updates of the scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mezzo import _launch
from mezzo._errors import PolicyError, ScalerError
from mezzo.scaling.diagnostics import EVERY, CollapseMonitor, ScaleSnapshot
from mezzo.scaling.gradients import Flags
from mezzo.scaling.scale_state import OptimizerStage, ScaleRule, ScaleState, float32, is_scale
from mezzo.scaling.scale_tensors import DeviceLossScale, LossScale, loss_scale_on
from mezzo.scaling.step_result import NO_SOURCE, FlaggedSource, NonfiniteSource


@dataclass(slots=True)
class OptimizerRecord:
    """The stage of an optimizer and the flags found in its gradients, for each loss."""

    stage: OptimizerStage = OptimizerStage.READY
    """What was done with the optimizer so far."""
    found_inf: dict[int, Flags] = field(default_factory=dict)
    """Index of the loss → flags."""
    known: list[bool | None] = field(default_factory=list)
    """What each check told the host: whether a gradient was not finite, or None where only the
    flags know."""
    source: NonfiniteSource = NO_SOURCE
    """Who can name the first bad parameter."""

    @property
    def found_nonfinite(self) -> bool | None:
        """Whether a gradient was not finite, where the host knows without waiting."""
        return None if not self.known or None in self.known else True in self.known

    def flags(self, index: int) -> Flags:
        """The flags of one loss, to be raised."""
        flags = self.found_inf.get(index)
        if flags is None:
            flags = self.found_inf[index] = {}
        return flags

    def all_flags(self) -> list[torch.Tensor]:
        """Every flag that was recorded."""
        return [flag for flags in self.found_inf.values() for flag in flags.values()]


def combine(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flag for several, on one device; nothing is read unless that device is the CPU and a flag comes from elsewhere."""
    if len(flags) == 1 and flags[0].device == device:
        return flags[0]
    # A copy to the CPU that does not block could be looked at before it has arrived.
    moved = [flag.reshape(()).to(device, non_blocking=device.type != "cpu") for flag in flags]
    return torch.stack(moved).amax(0) if len(moved) > 1 else moved[0]


def common_device(flags: list[torch.Tensor]) -> torch.device:
    """Where flags are combined to be read once: where the first is that is not on a CPU."""
    return next((flag.device for flag in flags if flag.device.type != "cpu"), flags[0].device)


class LossScales:
    """A scale, its rule and its watcher for each loss."""

    def __init__(
        self, rule: ScaleRule, states: list[ScaleState], watchers: list[CollapseMonitor]
    ) -> None:
        self.rule = rule
        self.initial = states
        """What a scale starts from where no loss was seen yet."""
        self.made: list[LossScale | None] = [None] * len(states)
        """The scales that are on a device."""
        self._watchers = watchers

    def __len__(self) -> int:
        return len(self.made)

    def require(self, call: str) -> None:
        """Refuse what makes no sense before a loss was scaled."""
        if self.made[0] is None and all(scale is None for scale in self.made):
            raise ScalerError(
                f"{call} was called before any loss was scaled. Call scaler.scale(loss).backward()"
                " first."
            )

    def of(self, loss_id: int) -> LossScale:
        """The scale of a loss that was scaled already."""
        scale = self.made[loss_id]
        if scale is None:
            raise ScalerError(
                f"The loss with loss_id={loss_id} was not scaled yet. Call scaler.backward(loss,"
                f" loss_id={loss_id}, optimizers=...) first."
            )
        return scale

    def make(self, device: torch.device, loss_id: int) -> LossScale:
        """The scale of a loss, made on the device of the first one."""
        if not 0 <= loss_id < len(self.made):
            raise ScalerError(
                f"loss_id={loss_id}: this scaler has {len(self.made)} losses, 0 to"
                f" {len(self.made) - 1}. Make it with GradScaler(num_losses={max(loss_id, 0) + 1})."
            )
        scale = self.made[loss_id]
        if scale is None:
            scale = self.made[loss_id] = loss_scale_on(device, self.initial[loss_id])
        return scale

    def advance(self, loss_id: int, flags: list[torch.Tensor], culprit: NonfiniteSource) -> None:
        """Adapt the scale of a loss to the flags of its gradients."""
        scale = self.of(loss_id)
        scale.advance(combine(flags, scale.scale.device), self.rule)
        if not _launch.is_capturing(scale.scale.device):
            self._watchers[loss_id].observe(scale, self.rule, culprit)

    def replayed(self, shown: Callable[[], tuple[float, int]], source: NonfiniteSource) -> None:
        """Count a captured step that ran again on the host, which it did not reach; `shown` gives the scale and the skips in a row that have arrived here."""
        scale = self.made[0]
        if isinstance(scale, DeviceLossScale):
            scale.steps += 1
            if scale.steps % EVERY == 0:
                self._watchers[0].judge(ScaleSnapshot(scale.steps, *shown(), self.rule, source))

    def set(self, new_scale: float | torch.Tensor) -> None:
        """Set every scale by hand, within the floor and the ceiling."""
        if isinstance(new_scale, torch.Tensor) and (
            new_scale.numel() != 1 or new_scale.requires_grad
        ):
            raise ScalerError(
                "update(new_scale) takes a number or a tensor of one element that needs no"
                f" gradient, got shape {tuple(new_scale.shape)},"
                f" requires_grad={new_scale.requires_grad}. Pass new_scale.detach() or a float."
            )
        for scale in self.made:
            if scale is not None:
                scale.set(new_scale, self.rule)

    def state(self, loss_id: int) -> ScaleState:
        """The scale of a loss and its counters as a value; this may wait for the device."""
        scale = self.made[loss_id]
        return self.initial[loss_id] if scale is None else scale.read()

    def states(self) -> list[ScaleState]:
        """All of them."""
        return [self.state(loss_id) for loss_id in range(len(self.made))]

    def load(self, states: list[ScaleState], rule: ScaleRule) -> None:
        """Take over saved states."""
        self.rule, self.initial = rule, states
        for scale, state in zip(self.made, states, strict=True):
            if scale is not None:
                scale.load(state)


def first_states(rule: ScaleRule, scale: float, losses: int) -> list[ScaleState]:
    """What the scales of a new scaler start from."""
    if isinstance(losses, bool) or not isinstance(losses, int) or losses < 1:
        raise PolicyError(f"losses={losses!r}: it must be a number of losses, 1 or more.")
    if not is_scale(float32(scale)):
        raise PolicyError(
            f"init_scale={scale!r}: it must be a positive finite float32, such as 65536.0."
        )
    return [ScaleState(rule.clamp(scale))] * losses


class FusedStepProtocol(Protocol):
    """A step that skips by itself, on a CPU too: 16-bit gradients are not unscaled in place."""

    reads_on_device: bool
    """Whether scheduled values may be tensors, for nothing reads them on the host."""

    def check(self, scale: torch.Tensor, flags: Flags, culprit: FlaggedSource) -> bool:
        """Check the gradients, which are `scale` times too large, in a way of one's own; false where there is none."""

    def widen_gradients(self) -> None:
        """Turn 16-bit gradients into float32 ones, for whoever is going to unscale them in place: in float16 small ones would be gone."""


def binding_of(optimizer: torch.optim.Optimizer) -> FusedStepProtocol | None:
    """What an optimizer's step was bound to.

    >>> binding_of(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    """
    return optimizer.__dict__.get("_bound")
