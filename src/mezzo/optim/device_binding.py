"""Bound steps that run on the device without a host read, and can be captured in a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from mezzo import _launch
from mezzo.optim.binding import Optimizer, OptimizerBinding, optimizer_binding
from mezzo.optim.master_weights import version_of
from mezzo.scaling.gradients import parameters


class ReplayPlan(Protocol):
    """The parameters that a captured step updates."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters that had a gradient in the capture."""

    @property
    def versions(self) -> list[int]:
        """Their versions after the last update by this binding.

        Another one shows that other code has written a parameter.
        """

    def note_written(self, versions: list[int]) -> None:
        """Note the versions after an update."""

    def has_states(self, state: Any) -> bool:
        """Return whether an optimizer's state has the tensors that the step updates."""


class DeviceBinding(OptimizerBinding, ABC):
    """A bound step that reads the scale, `found_inf` and learning rates on the device.

    The methods are in the order in which a captured training step calls them: `recapture_key`
    before every call; `before_capture`, `after_capture` and `captured` once for each graph;
    `before_replay` before every replay that updates.
    """

    captures = True

    @abstractmethod
    def recapture_key(self) -> tuple[Any, ...]:
        """Return what a captured step depends on: if it changes, the step is captured again."""

    def before_capture(self) -> None:
        """Prepare what must not happen, or not be allocated, in a capture.

        Resyncs masters: captured, that would drop companions at every replay. Those of all
        parameters, since it is not known yet which of them the captured step updates.
        """
        for parameter in parameters(self.optimizer):
            if parameter in self.masters:
                self.masters.prepare_companion(parameter)

    def after_capture(self) -> None:
        """Finish what needs addresses that are known only after the capture."""

    @abstractmethod
    def captured(self) -> tuple[ReplayPlan | None, Any]:
        """Return the plan of the step that was just captured, and tensors that it reads.

        Both must be kept alive as long as the graph is replayed. None if nothing was stepped.
        """

    @abstractmethod
    def before_replay(self, plan: Any) -> None:
        """Copy changed learning rates to the device, and resync masters.

        Call `recapture_key` first, in the same step.
        """

    def _lacks_states(self, plan: ReplayPlan | None) -> bool:
        """Return whether other code has cleared or replaced states since the last step."""
        return plan is not None and not plan.has_states(self.optimizer.state)

    def _resync_written(self, plan: ReplayPlan) -> None:
        """Update the masters of parameters if other code has written one since the last update."""
        if list(map(version_of, plan.parameters)) != plan.versions:
            self._resync_masters(plan)

    def _resync_masters(self, plan: ReplayPlan) -> None:
        for parameter in plan.parameters:
            if parameter in self.masters:
                self.masters.prepare_companion(parameter)
        plan.note_written(list(map(version_of, plan.parameters)))


def device_binding(optimizer: Optimizer) -> DeviceBinding | None:
    """Return the binding of an optimizer whose step can be captured, or None."""
    binding = optimizer_binding(optimizer)
    return binding if isinstance(binding, DeviceBinding) else None


def write_table(
    existing: torch.Tensor | None, device: torch.device, table: torch.Tensor
) -> torch.Tensor:
    """Copy a table to the device, into the existing memory if it fits: captured steps read it."""
    if existing is None or existing.shape != table.shape or existing.device != device:
        return _launch.table_on(device, table)
    return existing.copy_(_launch.pinned_for(device, table), non_blocking=True)
