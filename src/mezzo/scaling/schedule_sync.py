"""Bring a scheduler and its optimizer up to date before they are read.

While a schedule runs on a device, the scheduler object and `optimizer.param_groups` lag behind it.
Both get a subclass of their own class, under the same name, that catches up when it is read; copies
and pickles are of the plain class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError

Optimizer = torch.optim.Optimizer

_MARK = "_mezzo_schedule"
"""On the optimizer, whose pickles and state dicts leave it out; a scheduler's `state_dict()` is
all that its `__dict__` holds."""


class LaggingSchedule(Protocol):
    """A schedule that the scheduler and the optimizer's groups lag behind."""

    paused: bool
    """Whether both are read as they are."""

    def catch_up(self) -> None:
        """Bring both up to date. This may synchronize."""

    def changed(self) -> None:
        """Note that the scheduler, which was up to date, was changed by hand."""


@dataclass(frozen=True)
class _Kept:
    schedule: LaggingSchedule
    schedulers: tuple[LRScheduler, ...]


def sync_on_read(
    optimizer: Optimizer, schedulers: Iterable[LRScheduler], schedule: LaggingSchedule
) -> None:
    """Let a schedule catch up before its optimizer's groups are read, or the rates, the state or the epoch of one of its schedulers."""
    stop_sync(optimizer)
    kept = _Kept(schedule, tuple(schedulers))
    vars(optimizer)[_MARK] = kept
    _set_class(optimizer, _reader(_OptimizerReader, class_of(optimizer)))
    for scheduler in kept.schedulers:
        _set_class(scheduler, _reader(_SchedulerReader, class_of(scheduler)))


def stop_sync(optimizer: Optimizer) -> None:
    """Catch up a last time, and make the optimizer and its schedulers plain again."""
    kept: _Kept | None = vars(optimizer).get(_MARK)
    if kept is None:
        return
    try:
        kept.schedule.catch_up()
    finally:
        del vars(optimizer)[_MARK]
        _set_class(optimizer, class_of(optimizer))
        for scheduler in kept.schedulers:
            _set_class(scheduler, class_of(scheduler))


def is_synced_on_read(optimizer: Optimizer, schedule: LaggingSchedule) -> bool:
    """Return whether it is this schedule that an optimizer lags behind."""
    kept: _Kept | None = vars(optimizer).get(_MARK)
    return kept is not None and kept.schedule is schedule


def catch_up(optimizer: Optimizer) -> None:
    """Bring an optimizer's groups and their scheduler up to date. This synchronizes if a step was taken since the last time."""
    kept: _Kept | None = vars(optimizer).get(_MARK)
    if kept is not None and not kept.schedule.paused:
        kept.schedule.catch_up()


@contextmanager
def without_sync(schedule: LaggingSchedule) -> Iterator[None]:
    """Let the scheduler and the optimizer of a schedule be read and stepped as they are."""
    before, schedule.paused = schedule.paused, True
    try:
        yield
    finally:
        schedule.paused = before


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return `optimizer.param_groups` without catching up: scheduled values may be old. Never synchronizes.

    >>> len(groups_of(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
    1
    """
    # A wrapper may compute its groups, and have none of its own.
    found: list[dict[str, Any]] | None = vars(optimizer).get("param_groups")
    return optimizer.param_groups if found is None else found


def class_of(one: Optimizer | LRScheduler) -> Any:
    """Return the class that an optimizer or a scheduler was made with."""
    return vars(type(one)).get("_made_with", type(one))


class _SchedulerReader(LRScheduler):
    """Goes before the class of a scheduler that lags behind."""

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
        """What is set by hand holds from the coming step on."""
        if _kept(self.optimizer).schedule.paused:
            super().__setattr__(name, value)
        else:
            with self._by_hand():
                super().__setattr__(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._by_hand():
            super().load_state_dict(state_dict)

    def get_last_lr(self) -> Any:
        catch_up(self.optimizer)
        return super().get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        catch_up(self.optimizer)
        return super().state_dict()

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not _kept(self.optimizer).schedule.paused:
            raise ScalerError(
                "scheduler.step() was called, but this scheduler was passed to scaler.step() or to"
                " a training step, which steps it after every step that is not skipped. Remove"
                " scheduler.step(), or do not pass the scheduler."
            )
        super().step(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        return _reduced(self, self.optimizer)

    @contextmanager
    def _by_hand(self) -> Iterator[None]:
        schedule = _kept(self.optimizer).schedule
        schedule.catch_up()
        with without_sync(schedule):
            yield
        schedule.changed()


class _OptimizerReader(Optimizer):
    """Goes before the class of an optimizer whose groups lag behind."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        catch_up(self)
        return vars(self)["param_groups"]  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        catch_up(self)
        vars(self)["param_groups"] = groups

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        # It reads the groups for their parameters alone: no reason to synchronize in every
        # iteration.
        with without_sync(_kept(self).schedule):
            super().zero_grad(*args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        return _reduced(self, self)


@cache
def _reader(reader: Any, kind: Any) -> Any:
    # `steps_as` says whose fused step an optimizer may use: that of the class which it was made
    # with.
    own = {
        "_made_with": kind,
        "steps_as": vars(kind).get("steps_as", kind),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return new_class(
        kind.__name__, (reader, kind), exec_body=lambda namespace: namespace.update(own)
    )


def _kept(optimizer: Optimizer) -> _Kept:
    kept: _Kept = vars(optimizer)[_MARK]
    return kept


def _set_class(one: Optimizer | LRScheduler, kind: Any) -> None:
    # Not by the attribute, which a scheduler would take for a change by hand.
    object.__setattr__(one, "__class__", kind)


def _reduced(one: Any, optimizer: Optimizer) -> Any:
    """Reduce an object for a copy or a pickle as one of the class that it was made with."""
    catch_up(optimizer)
    kind = type(one)
    _set_class(one, class_of(one))
    try:
        # From protocol 2 on, pickle compares the class with that of the object.
        return one.__reduce_ex__(1)
    finally:
        _set_class(one, kind)
