"""Bring a scheduler and its optimizer up to date before they are read.

While a schedule runs on a device, the scheduler object and `optimizer.param_groups` lag behind it.
The class of both is replaced by a subclass with the same name that updates the object before it is
read; `isinstance` still holds, and copies and pickles are of the original class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError

Optimizer = torch.optim.Optimizer

_SYNC = "_mezzo_schedule"
"""Attribute of the optimizer, whose pickles and state dicts leave it out. Not of the scheduler:
its `state_dict()` is its whole `__dict__`."""


class LaggingSchedule(ABC):
    """A schedule on a device, which its scheduler and the optimizer's groups lag behind."""

    is_paused = False
    """Whether both are read as they are, without an update."""

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Read and step both as they are inside the block, without updates."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @abstractmethod
    def catch_up(self) -> None:
        """Bring both up to date. This may synchronize."""

    @abstractmethod
    def changed(self) -> None:
        """Restart from the scheduler, which was up to date and was then changed by the user."""


@dataclass(frozen=True)
class _Sync:
    """The schedule that an optimizer and its schedulers are updated from."""

    schedule: LaggingSchedule
    schedulers: tuple[LRScheduler, ...]


def sync_on_read(
    optimizer: Optimizer, schedulers: Iterable[LRScheduler], schedule: LaggingSchedule
) -> None:
    """Update an optimizer and its schedulers from a schedule whenever they are read.

    Reads are `optimizer.param_groups`, state dicts, copies, `get_last_lr()` and `last_epoch`.
    """
    stop_sync(optimizer)
    sync = _Sync(schedule, tuple(schedulers))
    vars(optimizer)[_SYNC] = sync
    _set_class(optimizer, _synced_class(_SyncedOptimizer, class_of(optimizer)))
    for scheduler in sync.schedulers:
        _set_class(scheduler, _synced_class(_SyncedScheduler, class_of(scheduler)))


def stop_sync(optimizer: Optimizer) -> None:
    """Update an optimizer and its schedulers a last time, and restore their classes."""
    sync: _Sync | None = vars(optimizer).get(_SYNC)
    if sync is None:
        return
    try:
        sync.schedule.catch_up()
    finally:
        del vars(optimizer)[_SYNC]
        _set_class(optimizer, class_of(optimizer))
        for scheduler in sync.schedulers:
            _set_class(scheduler, class_of(scheduler))


def is_synced_on_read(optimizer: Optimizer, schedule: LaggingSchedule) -> bool:
    """Return whether an optimizer is updated from this schedule."""
    sync: _Sync | None = vars(optimizer).get(_SYNC)
    return sync is not None and sync.schedule is schedule


def catch_up(optimizer: Optimizer) -> None:
    """Bring an optimizer's groups and their scheduler up to date.

    This synchronizes if a step was taken since the last time.
    """
    sync: _Sync | None = vars(optimizer).get(_SYNC)
    if sync is not None and not sync.schedule.is_paused:
        sync.schedule.catch_up()


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return `optimizer.param_groups` as they are: scheduled values may be old. Never synchronizes.

    >>> len(groups_of(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
    1
    """
    # A wrapper may compute its groups, and have no such attribute.
    groups: list[dict[str, Any]] | None = vars(optimizer).get("param_groups")
    return optimizer.param_groups if groups is None else groups


def class_of(target: Optimizer | LRScheduler) -> Any:
    """Return the class of an optimizer or a scheduler, without `sync_on_read`."""
    return vars(type(target)).get("_original_class", type(target))


class _SyncedScheduler(LRScheduler):
    """First base class of a scheduler that is updated before it is read."""

    @property
    def last_epoch(self) -> int:
        catch_up(self.optimizer)
        try:
            return vars(self)["last_epoch"]  # type: ignore[no-any-return]
        except KeyError:
            # A ChainedScheduler has none.
            raise AttributeError("last_epoch") from None

    @last_epoch.setter
    def last_epoch(self, epoch: int) -> None:
        vars(self)["last_epoch"] = epoch

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, from the next step on."""
        if _sync_of(self.optimizer).schedule.is_paused:
            super().__setattr__(name, value)
        else:
            with self._manual_change():
                super().__setattr__(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._manual_change():
            super().load_state_dict(state_dict)

    def get_last_lr(self) -> Any:
        catch_up(self.optimizer)
        return super().get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        catch_up(self.optimizer)
        return super().state_dict()

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not _sync_of(self.optimizer).schedule.is_paused:
            raise ScalerError(
                "scheduler.step() was called, but this scheduler was passed to scaler.step() or to"
                " a training step, which steps it after every step that is not skipped. Remove"
                " scheduler.step(), or do not pass the scheduler."
            )
        super().step(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        return _reduce(self, self.optimizer)

    @contextmanager
    def _manual_change(self) -> Iterator[None]:
        schedule = _sync_of(self.optimizer).schedule
        schedule.catch_up()
        with schedule.without_sync():
            yield
        schedule.changed()


class _SyncedOptimizer(Optimizer):
    """First base class of an optimizer whose groups are updated before they are read."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        catch_up(self)
        return vars(self)["param_groups"]  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        catch_up(self)
        vars(self)["param_groups"] = groups

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        # It reads only the parameters of the groups: no reason to synchronize at every step.
        with _sync_of(self).schedule.without_sync():
            super().zero_grad(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        return _reduce(self, self)


@cache
def _synced_class(base: Any, kind: Any) -> Any:
    # `steps_as` names the class whose fused step an optimizer may use.
    namespace = {
        "_original_class": kind,
        "steps_as": vars(kind).get("steps_as", kind),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return new_class(kind.__name__, (base, kind), exec_body=lambda body: body.update(namespace))


def _sync_of(optimizer: Optimizer) -> _Sync:
    sync: _Sync = vars(optimizer)[_SYNC]
    return sync


def _set_class(target: Optimizer | LRScheduler, kind: Any) -> None:
    # Not `target.__class__ = kind`, which a synced scheduler treats as a change by the user.
    object.__setattr__(target, "__class__", kind)


def _reduce(target: Any, optimizer: Optimizer) -> Any:
    """Reduce an object for a copy or a pickle, with its original class."""
    catch_up(optimizer)
    kind = type(target)
    _set_class(target, class_of(target))
    try:
        # From protocol 2 on, pickle compares the class with that of the object.
        return target.__reduce_ex__(1)
    finally:
        _set_class(target, kind)
