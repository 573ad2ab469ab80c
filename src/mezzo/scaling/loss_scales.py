"""One loss scale per loss, and a record per optimizer between two updates of the scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from mezzo import _launch
from mezzo._errors import PolicyError, ScalerError
from mezzo.scaling.diagnostics import CHECK_INTERVAL, CollapseMonitor, ScaleSnapshot
from mezzo.scaling.gradients import Flags
from mezzo.scaling.mesh import ProcessMesh
from mezzo.scaling.scale_state import OptimizerStage, ScaleRule, ScaleState, float32, is_scale
from mezzo.scaling.scale_tensors import DeviceLossScale, LossScale, loss_scale_on
from mezzo.scaling.step_result import NO_SOURCE, FlaggedSource, NonfiniteSource


@dataclass(slots=True)
class OptimizerRecord:
    """The stage of an optimizer and the flags of its gradients since the last update."""

    stage: OptimizerStage = OptimizerStage.READY
    """What was done with the optimizer so far."""
    found_inf: dict[int, Flags] = field(default_factory=dict)
    """The `found_inf` flags of each loss, by `loss_id`."""
    known: list[bool | None] = field(default_factory=list)
    """For each check, whether a gradient was not finite; None if only the flags have the answer."""
    source: NonfiniteSource = NO_SOURCE
    """The first parameter with a non-finite gradient."""
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer, if it was checked by a call of the scaler."""

    @property
    def found_nonfinite(self) -> bool | None:
        """Whether a gradient was not finite; None if the host would have to read a flag."""
        return None if not self.known or None in self.known else True in self.known

    def enter(self, stage: OptimizerStage) -> None:
        """Enter a stage."""
        self.stage = stage

    def name_source(self, source: NonfiniteSource) -> None:
        """Name the first parameter with a non-finite gradient."""
        self.source = source

    def add_flagged(self, source: FlaggedSource) -> FlaggedSource:
        """Return the source to which a check on a device adds its flags: this one if it is new."""
        if not isinstance(self.source, FlaggedSource):
            self.source = source
        return self.source

    def flags(self, loss_id: int) -> Flags:
        """Return the flags of one loss; a check sets them in place."""
        flags = self.found_inf.get(loss_id)
        if flags is None:
            flags = self.found_inf[loss_id] = {}
        return flags

    def all_flags(self) -> list[torch.Tensor]:
        """Return the flags of all losses and devices."""
        return [flag for flags in self.found_inf.values() for flag in flags.values()]


def combine(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Combine flags into one on a device. Synchronizes only if a flag must move to the CPU."""
    if len(flags) == 1 and flags[0].device == device:
        return flags[0]
    # A copy to the CPU blocks: an asynchronous one could be read before it has arrived.
    moved = [flag.reshape(()).to(device, non_blocking=device.type != "cpu") for flag in flags]
    return torch.stack(moved).amax(0) if len(moved) > 1 else moved[0]


def common_device(flags: list[torch.Tensor]) -> torch.device:
    """Return the device on which to combine flags: that of the first one that is not on a CPU."""
    return next((flag.device for flag in flags if flag.device.type != "cpu"), flags[0].device)


def share_flags(
    mesh: ProcessMesh, flags: Flags, square_sum: torch.Tensor | None = None
) -> torch.Tensor:
    """Make flags, in place, hold for all processes of a mesh; return a sum of squares over it."""
    found = list(flags.values())
    flag = combine(found, common_device(found))
    total, shared = mesh.reduce(square_sum, flag, flag.device)
    flags.clear()
    flags[shared.device] = shared
    return total


class LossScales:
    """The scale and the collapse monitor of each loss, and the rule of all."""

    def __init__(
        self, rule: ScaleRule, states: list[ScaleState], monitors: list[CollapseMonitor]
    ) -> None:
        self.rule = rule
        self.initial = states
        """The state that each scale starts from."""
        self.scales: list[LossScale | None] = [None] * len(states)
        """The scale of each loss; None until the loss is first scaled, which gives the device."""
        self._monitors = monitors

    def __len__(self) -> int:
        return len(self.scales)

    def require(self, call: str) -> None:
        """Raise `ScalerError` if no loss was scaled yet; `call` is named in the message."""
        if self.scales[0] is None and all(scale is None for scale in self.scales):
            raise ScalerError(
                f"{call} was called before any loss was scaled. Call scaler.scale(loss).backward()"
                " first."
            )

    def of(self, loss_id: int) -> LossScale:
        """Return the scale of a loss that was scaled already."""
        scale = self.scales[loss_id]
        if scale is None:
            raise ScalerError(
                f"The loss with loss_id={loss_id} was not scaled yet. Call scaler.backward(loss,"
                f" loss_id={loss_id}, optimizers=...) first."
            )
        return scale

    def make(self, device: torch.device, loss_id: int) -> LossScale:
        """Return the scale of a loss; create it on `device` if it does not exist."""
        if not 0 <= loss_id < len(self.scales):
            raise ScalerError(
                f"loss_id={loss_id}: this scaler has {len(self.scales)} losses, 0 to"
                f" {len(self.scales) - 1}. Construct it with"
                f" GradScaler(num_losses={max(loss_id, 0) + 1})."
            )
        scale = self.scales[loss_id]
        if scale is None:
            scale = self.scales[loss_id] = loss_scale_on(device, self.initial[loss_id])
        return scale

    def advance(self, loss_id: int, flags: list[torch.Tensor], source: NonfiniteSource) -> None:
        """Adapt the scale of a loss to the flags of its gradients."""
        scale = self.of(loss_id)
        scale.advance(combine(flags, scale.scale.device), self.rule)
        if not _launch.is_capturing(scale.scale.device):
            self._monitors[loss_id].observe(scale, self.rule, source)

    def replayed(
        self, scale_and_skips: Callable[[], tuple[float, int]], source: NonfiniteSource
    ) -> None:
        """Count a replayed step on the host.

        `scale_and_skips` returns the latest scale and consecutive skips that are on the host.
        """
        scale = self.scales[0]
        if isinstance(scale, DeviceLossScale):
            steps = scale.count_replay()
            if steps % CHECK_INTERVAL == 0:
                self._monitors[0].judge(ScaleSnapshot(steps, *scale_and_skips(), self.rule, source))

    def change_rule(self, **fields: Any) -> None:
        """Change fields of the rule."""
        self.rule = replace(self.rule, **fields)

    def change_first(self, **fields: Any) -> None:
        """Change fields of the state that the first scale starts from."""
        first, *others = self.initial
        self.initial = [replace(first, **fields), *others]

    def set(self, new_scale: float | torch.Tensor) -> None:
        """Set all scales, clamped to the floor and the ceiling."""
        if isinstance(new_scale, torch.Tensor) and (
            new_scale.numel() != 1 or new_scale.requires_grad
        ):
            raise ScalerError(
                "update(new_scale) takes a number or a tensor of one element that needs no"
                f" gradient, got shape {tuple(new_scale.shape)},"
                f" requires_grad={new_scale.requires_grad}. Pass new_scale.detach() or a float."
            )
        for scale in self.scales:
            if scale is not None:
                scale.set(new_scale, self.rule)

    def state(self, loss_id: int) -> ScaleState:
        """Return the state of a loss's scale. This synchronizes, unless it is on a CPU."""
        scale = self.scales[loss_id]
        return self.initial[loss_id] if scale is None else scale.read()

    def states(self) -> list[ScaleState]:
        """Return the states of all scales."""
        return [self.state(loss_id) for loss_id in range(len(self.scales))]

    def load(self, states: list[ScaleState], rule: ScaleRule) -> None:
        """Set the states of all scales, and the rule."""
        self.rule, self.initial = rule, states
        for scale, state in zip(self.scales, states, strict=True):
            if scale is not None:
                scale.load(state)


def first_states(rule: ScaleRule, scale: float, losses: int) -> list[ScaleState]:
    """Return the states that the scales of a new scaler start from."""
    if isinstance(losses, bool) or not isinstance(losses, int) or losses < 1:
        raise PolicyError(f"num_losses={losses!r}: it must be a number of losses, 1 or more.")
    if not is_scale(float32(scale)):
        raise PolicyError(
            f"init_scale={scale!r}: it must be a positive finite float32, such as 65536.0."
        )
    return [ScaleState(rule.clamp(scale))] * losses


class BoundStep(Protocol):
    """A bound step that skips by itself, on a CPU too: 16-bit gradients stay scaled."""

    device_values: frozenset[str]
    """Entries of a group, such as the learning rate, that the step reads on the device only."""

    @property
    def mesh(self) -> ProcessMesh | None:
        """The processes that hold the parameters; None if no parameter is sharded."""

    def check(self, scale: torch.Tensor, flags: Flags, source: FlaggedSource) -> bool:
        """Check the gradients, which are multiplied by `scale`; return False if it cannot.

        The flags hold for all processes of the mesh if parameters are sharded.
        """

    def widen_gradients(self) -> None:
        """Cast 16-bit gradients to float32 before they are unscaled in place.

        Unscaled in float16, small ones would become zero.
        """


def binding_of(optimizer: torch.optim.Optimizer) -> BoundStep | None:
    """Return the binding of a bound optimizer, or None.

    In `optim` and above it, `optimizer_binding` returns the same with its whole type.

    >>> binding_of(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    """
    return optimizer.__dict__.get("_bound")
