"""Schedulers that a scaler steps: on the device, where only the device knows of a skip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import LRScheduler

from mezzo import _launch
from mezzo.scaling.loss_scales import binding_of
from mezzo.scaling.schedule_lookahead import check_scheduler, scheduled_keys
from mezzo.scaling.schedule_sync import catch_up, is_synced_on_read, stop_sync

if TYPE_CHECKING:
    from mezzo.scaling.device_schedule import DeviceSchedule

Optimizer = torch.optim.Optimizer


@dataclass(slots=True)
class RunningSchedule:
    """A scheduler whose schedule runs on the device."""

    scheduler: LRScheduler
    schedule: DeviceSchedule
    good_steps: torch.Tensor
    """Successful steps of the optimizer since the schedule started, on the device."""


class Schedules:
    """The device schedule of each optimizer that was stepped with a scheduler."""

    def __init__(self) -> None:
        self._running: dict[Optimizer, RunningSchedule] = {}
        self._accepted: WeakSet[LRScheduler] = WeakSet()

    def accept(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Raise `UnsupportedError` if a scheduler cannot be stepped with an optimizer."""
        if scheduler not in self._accepted or scheduler.optimizer is not optimizer:
            check_scheduler(optimizer, scheduler)
            self._accepted.add(scheduler)

    @contextmanager
    def values_applied(
        self, optimizer: Optimizer, scheduler: LRScheduler, found_inf: torch.Tensor
    ) -> Iterator[None]:
        """Set the scheduler's values for one step, and advance it unless the step is skipped."""
        if not _is_deferred(optimizer, scheduler, found_inf.device):
            yield
            if not bool(found_inf):
                advance_scheduler(optimizer, scheduler)
            return
        running = self._running_for(optimizer, scheduler, found_inf.device)
        with running.schedule.values_applied(running.good_steps):
            yield
        running.good_steps.add_(found_inf == 0)

    def before_replay(self) -> tuple[int, ...]:
        """Do the host work before a replay; return the addresses of the tables that it reads."""
        # Runs at every replay, mostly without a schedule.
        if not self._running:
            return ()
        for optimizer, last in self._running.items():
            running = self._running_for(optimizer, last.scheduler, last.good_steps.device)
            running.schedule.before_replay(running.good_steps)
        return self.tables()

    def tables(self) -> tuple[int, ...]:
        """Return the addresses of the tables of future values."""
        return tuple([running.schedule.address for running in self._running.values()])

    def reconcile(self) -> None:
        """Bring schedulers and optimizers up to date.

        This synchronizes if a step was taken since the last time.
        """
        for optimizer in self._running:
            catch_up(optimizer)

    def _running_for(
        self, optimizer: Optimizer, scheduler: LRScheduler, device: torch.device
    ) -> RunningSchedule:
        """Return the schedule of a scheduler.

        Starts a new one if another scheduler, or another scaler, has stepped the optimizer since.
        """
        running = self._running.get(optimizer)
        if (
            running is None
            or running.scheduler is not scheduler
            or not is_synced_on_read(optimizer, running.schedule)
        ):
            running = self._running[optimizer] = _start(optimizer, scheduler, device)
        return running


def advance_scheduler(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Step a scheduler after a step that is known on the host to be successful."""
    # Another scaler may have stepped it on a device before.
    stop_sync(optimizer)
    scheduler.step()


def _is_deferred(optimizer: Optimizer, scheduler: LRScheduler, device: torch.device) -> bool:
    """Return whether only the device has the answer whether a step was skipped."""
    if not _launch.needs_sync(device):
        return False
    binding = binding_of(optimizer)
    # If a bound step reads a scheduled value on the host, the flag may be read there too.
    return binding is None or binding.device_values.issuperset(scheduled_keys(scheduler))


def _start(optimizer: Optimizer, scheduler: LRScheduler, device: torch.device) -> RunningSchedule:
    # Imported when a scheduler is first passed, which most users never do.
    from mezzo.scaling.device_schedule import DeviceSchedule  # noqa: PLC0415

    # An earlier schedule brings the optimizer up to date first.
    stop_sync(optimizer)
    good_steps = torch.zeros((), dtype=torch.int64, device=device)
    schedule = DeviceSchedule(optimizer, scheduler, device)
    schedule.reconcile_when_read(lambda: int(good_steps))
    return RunningSchedule(scheduler, schedule, good_steps)
