"""Compute the future values of a scheduler from a copy of it.

The scheduler, its optimizer and its warnings are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from mezzo._errors import UnsupportedError
from mezzo.scaling.schedule_sync import class_of, groups_of

Row = tuple[float, ...]
"""The scheduled numbers of one step: group by group and key by key, pairs like betas flattened."""

AHEAD = 256
"""Steps whose values are computed ahead."""

_KNOWN_STEPS = frozenset(
    kind.step
    for kind in (
        lr_scheduler.LRScheduler,
        lr_scheduler.SequentialLR,
        lr_scheduler.ChainedScheduler,
        lr_scheduler.CosineAnnealingWarmRestarts,
    )
)
"""`step` methods that change nothing but the scheduler and the optimizer's groups."""

_REMEDY = (
    "Do not pass it: call its step() yourself, after each epoch or after each training step that"
    " was not skipped. The rates that it sets hold from the next step on."
)


def check_scheduler(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> None:
    """Raise `UnsupportedError` if the future values of a scheduler cannot be computed.

    Changes neither the scheduler nor the optimizer.
    """
    check_kind(optimizer, scheduler)
    Lookahead(optimizer, scheduler, scheduled_keys(scheduler), 0).extend(0, AHEAD)


def check_kind(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> None:
    """Raise `UnsupportedError` for a kind of scheduler whose values cannot be computed ahead."""
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        if isinstance(scheduler, type):
            raise UnsupportedError(
                f"scheduler={scheduler.__name__} is a class. Pass a scheduler of the optimizer:"
                f" {scheduler.__name__}(optimizer, ...)."
            )
        raise UnsupportedError(
            f"scheduler={scheduler!r} is not one of torch.optim.lr_scheduler. {_REMEDY}"
        )
    for part in parts(scheduler):
        _check_part(optimizer, part)
    tensors = [
        key
        for group in groups_of(optimizer)
        for key in scheduled_keys(scheduler)
        if isinstance(group[key], torch.Tensor)
    ]
    if tensors:
        raise UnsupportedError(
            f"group[{tensors[0]!r}] is a tensor. Construct the optimizer with a float: the schedule"
            " moves it to the device."
        )


def _check_part(optimizer: torch.optim.Optimizer, part: lr_scheduler.LRScheduler) -> None:
    name = type(part).__name__
    if isinstance(part, lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            f"{name} decides by a metric, so its future values are not known. {_REMEDY}"
        )
    if "step" in vars(part) or class_of(part).step not in _KNOWN_STEPS:
        raise UnsupportedError(
            f"{name} has a step() of its own, which may do more than set rates and cannot run"
            f" ahead. {_REMEDY}"
        )
    if part.optimizer is not optimizer:
        raise UnsupportedError(
            f"{name} belongs to another optimizer than the {type(optimizer).__name__} that steps."
            " Pass the optimizer and the scheduler that belong together."
        )


class Lookahead:
    """The values of future steps; `first` successful steps come before the first of them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: lr_scheduler.LRScheduler,
        keys: Sequence[str],
        first: int,
    ) -> None:
        self.first = first
        self._keys = keys
        self._groups = _ReplacementOptimizer(optimizer)
        self._others = self._unscheduled()
        try:
            # The memo makes deepcopy use the replacement as the copy of the optimizer.
            self._runner = copy.deepcopy(scheduler, {id(optimizer): self._groups})
        except Exception as error:
            raise UnsupportedError(
                f"{type(scheduler).__name__} cannot be copied, which is needed to compute its"
                f" future values: {error} {_REMEDY}"
            ) from error
        self._rows = [flat(self._groups.param_groups, keys)]
        self._end: Exception | None = None

    def extend(self, first: int, end: int) -> None:
        """Compute rows up to `end` or to the end of the schedule, and drop those before `first`."""
        while self.first + len(self._rows) < end and self._end is None:
            self._advance()
        dropped = min(first - self.first, len(self._rows) - 1)
        del self._rows[:dropped]
        self.first += dropped
        changed = sorted(
            {
                key
                for before, now in zip(self._others, self._unscheduled(), strict=True)
                for key in before.keys() | now.keys()
                if before.get(key) != now.get(key)
            }
        )
        if changed:
            raise UnsupportedError(
                f"{type(self._runner).__name__} changes {', '.join(changed)} of the optimizer's"
                f" groups; only lr, momentum and betas can be scheduled on the device. {_REMEDY}"
            )

    def row(self, good: int) -> Row:
        """Return the values of the step after `good` successful ones; past the end, the last."""
        return self._rows[min(max(good - self.first, 0), len(self._rows) - 1)]

    def raise_beyond_end(self, good: int) -> None:
        """Raise what the scheduler itself raises after `good` successful steps, if it does."""
        if self._end is not None and good >= self.first + len(self._rows):
            raise self._end

    def _advance(self) -> None:
        try:
            self._runner.step()
        # OneCycleLR ends with an exception, and so does a user's list of rates. It is raised when
        # training gets there.
        except Exception as error:  # noqa: BLE001 - raised when training gets there
            self._end = error
        else:
            self._rows.append(flat(self._groups.param_groups, self._keys))

    def _unscheduled(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in self._keys}
            for group in self._groups.param_groups
        ]


class _ReplacementOptimizer:
    """The groups of an optimizer without its parameters, for the copy of its scheduler."""

    # A scheduler warns if the optimizer did not step before it.
    _opt_called = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in groups_of(optimizer)
        ]
        self.defaults = optimizer.defaults

    def step(self) -> None:
        """Do nothing; schedulers only look at the attributes of this method."""

    # A scheduler warns if the optimizer's step was replaced after the scheduler was made.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


# -- scheduled numbers of an optimizer's groups ----------------------------------------------------


def flat(groups: Sequence[dict[str, Any]], keys: Sequence[str]) -> Row:
    """Return the scheduled numbers of an optimizer's groups as one row.

    >>> groups = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.8, 0.88)}]
    >>> flat(groups, ["lr", "betas"])
    (0.1, 0.9, 0.99, 0.2, 0.8, 0.88)
    """
    values = (group[key] for group in groups for key in keys)
    return tuple(
        number for value in values for number in (value if isinstance(value, tuple) else (value,))
    )


def spread(numbers: Iterator[Any], groups: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """Write a row into an optimizer's groups: the inverse of `flat`."""
    for group in groups:
        group.update(
            {
                key: (
                    tuple(next(numbers) for _ in value)
                    if isinstance(value := group[key], tuple)
                    else next(numbers)
                )
                for key in keys
            }
        )


def scheduled_keys(scheduler: lr_scheduler.LRScheduler) -> tuple[str, ...]:
    """Return the entries of a group that a scheduler changes."""
    cycled = (
        "betas" if vars(part).get("use_beta1") else "momentum"
        for part in parts(scheduler)
        if vars(part).get("cycle_momentum")
    )
    return tuple(dict.fromkeys(("lr", *cycled)))


def parts(scheduler: lr_scheduler.LRScheduler) -> Iterator[lr_scheduler.LRScheduler]:
    """Yield a scheduler and the schedulers that it consists of."""
    yield scheduler
    for part in vars(scheduler).get("_schedulers", ()):
        yield from parts(part)
