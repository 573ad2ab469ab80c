"""The scales of a scaler, one for each loss: made where the first loss is, advanced together, saved together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mezzo._errors import PolicyError, ScalerError
from mezzo.scaling import copies
from mezzo.scaling.culprit import Culprit
from mezzo.scaling.device import DeviceScale, Scale, scale_on
from mezzo.scaling.record import combine
from mezzo.scaling.state import ScaleRule, ScaleState, float32, is_scale
from mezzo.scaling.watch import EVERY, Glance, Watcher


class Scales:
    """A scale, its rule and its watcher for each loss."""

    def __init__(self, rule: ScaleRule, states: list[ScaleState], watchers: list[Watcher]) -> None:
        self.rule = rule
        self.initial = states
        """What a scale starts from where no loss was seen yet."""
        self.made: list[Scale | None] = [None] * len(states)
        """The scales that are on a device."""
        self._watchers = watchers

    def __len__(self) -> int:
        return len(self.made)

    def require(self, call: str) -> None:
        """Refuse what makes no sense before a loss was scaled."""
        if self.made[0] is None and all(scale is None for scale in self.made):
            raise ScalerError(f"{call} was called before any loss was scaled. Call scaler.scale(loss).backward() first.")

    def of(self, index: int) -> Scale:
        """The scale of a loss that was scaled already."""
        scale = self.made[index]
        if scale is None:
            raise ScalerError(f"The loss with index {index} was not scaled yet. Call scaler.backward(loss, index={index}, optimizers=...) first.")
        return scale

    def make(self, device: torch.device, index: int) -> Scale:
        """The scale of a loss, made on the device of the first one."""
        if not 0 <= index < len(self.made):
            raise ScalerError(
                f"index={index}: this scaler has {len(self.made)} losses, 0 to {len(self.made) - 1}. Make it with GradScaler(losses={max(index, 0) + 1})."
            )
        scale = self.made[index]
        if scale is None:
            scale = self.made[index] = scale_on(device, self.initial[index])
        return scale

    def advance(self, index: int, flags: list[torch.Tensor], culprit: Culprit) -> None:
        """Adapt the scale of a loss to the flags of its gradients."""
        scale = self.of(index)
        scale.advance(combine(flags, scale.scale.device), self.rule)
        if not copies.capturing(scale.scale.device):
            self._watchers[index].look(scale, self.rule, culprit)

    def replayed(self, shown: Callable[[], tuple[float, int]], source: Culprit) -> None:
        """Count a captured step that ran again on the host, which it did not reach; `shown` gives the scale and the skips in a row that have arrived here."""
        scale = self.made[0]
        if isinstance(scale, DeviceScale):
            scale.steps += 1
            if scale.steps % EVERY == 0:
                self._watchers[0].hear(Glance(scale.steps, *shown(), self.rule, source))

    def set(self, new_scale: float | torch.Tensor) -> None:
        """Set every scale by hand, within the floor and the ceiling."""
        if isinstance(new_scale, torch.Tensor) and (new_scale.numel() != 1 or new_scale.requires_grad):
            raise ScalerError(
                f"update(new_scale) takes a number or a tensor of one element that needs no gradient, got shape {tuple(new_scale.shape)}, "
                f"requires_grad={new_scale.requires_grad}. Pass new_scale.detach() or a float."
            )
        for scale in self.made:
            if scale is not None:
                scale.set(new_scale, self.rule)

    def state(self, index: int) -> ScaleState:
        """The scale of a loss and its counters as a value; this may wait for the device."""
        scale = self.made[index]
        return self.initial[index] if scale is None else scale.read()

    def states(self) -> list[ScaleState]:
        """All of them."""
        return [self.state(index) for index in range(len(self.made))]

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
        raise PolicyError(f"init_scale={scale!r}: it must be a positive finite float32, such as 65536.0.")
    return [ScaleState(rule.clamp(scale))] * losses
