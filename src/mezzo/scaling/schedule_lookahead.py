"""What a scheduler will do, learned from a copy that runs ahead of it: the scheduler itself, its optimizer and its warnings are left alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from mezzo._errors import UnsupportedError
from mezzo.scaling.schedule_sync import class_of, groups_of

Row = tuple[float, ...]
"""The scheduled numbers of one step: group by group, key by key, pairs like betas spread out."""

_KNOWN_STEPS = frozenset(
    kind.step
    for kind in (
        lr_scheduler.LRScheduler,
        lr_scheduler.SequentialLR,
        lr_scheduler.ChainedScheduler,
        lr_scheduler.CosineAnnealingWarmRestarts,
    )
)
"""Steps known to change nothing but the scheduler and the optimizer's groups."""

_BY_HAND = (
    "Do not pass it: call its step() yourself, after each epoch or after each training step that"
    " was not skipped. The rates that it sets hold from the next step on."
)

AHEAD = 256
"""Steps whose values are computed ahead."""


class Lookahead:
    """The values of the coming steps: `first` good steps are behind the first of them."""

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
            # deepcopy meets the optimizer under this name, and takes the stand-in for its copy.
            self._runner = copy.deepcopy(scheduler, {id(optimizer): self._groups})
        except Exception as error:
            raise UnsupportedError(
                f"{_name(scheduler)} cannot be copied, which is how its coming values are computed:"
                f" {error} {_BY_HAND}"
            ) from error
        self._rows = [flat(self._groups.param_groups, keys)]
        self._end: Exception | None = None

    def extend(self, first: int, end: int) -> None:
        """Forget what comes before `first`, and run on to `end` or to the end of the schedule."""
        while self.first + len(self._rows) < end and self._end is None:
            self._advance()
        gone = min(first - self.first, len(self._rows) - 1)
        del self._rows[:gone]
        self.first += gone
        if changed := sorted(
            {
                key
                for was, now in zip(self._others, self._unscheduled(), strict=True)
                for key in was.keys() | now.keys()
                if was.get(key) != now.get(key)
            }
        ):
            raise UnsupportedError(
                f"{_name(self._runner)} changes {', '.join(changed)} of the optimizer's groups, and"
                f" only lr, momentum and betas can lie on the device. {_BY_HAND}"
            )

    def row(self, good: int) -> Row:
        """The values of the step after `good` good ones; at the end of a schedule, the last."""
        return self._rows[min(max(good - self.first, 0), len(self._rows) - 1)]

    def refuse_beyond_end(self, good: int) -> None:
        """Raise what the scheduler itself raises so far on."""
        if self._end is not None and good >= self.first + len(self._rows):
            raise self._end

    def _advance(self) -> None:
        try:
            self._runner.step()
        # OneCycleLR ends so, and so does a user's list of rates; it is raised if training gets
        # there.
        except Exception as error:  # noqa: BLE001
            self._end = error
        else:
            self._rows.append(flat(self._groups.param_groups, self._keys))

    def _unscheduled(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in self._keys}
            for group in self._groups.param_groups
        ]


class _ReplacementOptimizer:
    """The groups of an optimizer without its parameters."""

    _opt_called = True  # A scheduler warns of an optimizer that did not step yet.

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in groups_of(optimizer)
        ]
        self.defaults = optimizer.defaults

    def step(self) -> None:
        """Is never called."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # A scheduler warns of an optimizer whose step was replaced.


def flat(groups: Sequence[dict[str, Any]], keys: Sequence[str]) -> Row:
    """The scheduled numbers of an optimizer's groups.

    >>> flat([{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.8, 0.88)}], ["lr", "betas"])
    (0.1, 0.9, 0.99, 0.2, 0.8, 0.88)
    """
    values = (group[key] for group in groups for key in keys)
    return tuple(
        number for value in values for number in (value if isinstance(value, tuple) else (value,))
    )


def spread(numbers: Iterator[Any], groups: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """Put numbers in the order of `flat` into an optimizer's groups."""
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
    """Which entries of a group a scheduler changes."""
    cycled = (
        "betas" if vars(part).get("use_beta1") else "momentum"
        for part in parts(scheduler)
        if vars(part).get("cycle_momentum")
    )
    return tuple(dict.fromkeys(("lr", *cycled)))


def check(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> None:
    """Raise `UnsupportedError` for a scheduler whose coming values cannot be computed. Neither it nor the optimizer is changed."""
    refuse(optimizer, scheduler)
    Lookahead(optimizer, scheduler, scheduled_keys(scheduler), 0).extend(0, AHEAD)


def refuse(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> None:
    """Refuse what cannot run ahead."""
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise UnsupportedError(
            f"scheduler={scheduler!r} is not one of torch.optim.lr_scheduler. {_BY_HAND}"
        )
    for part in parts(scheduler):
        if isinstance(part, lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedError(
                f"{_name(part)} decides by a metric, so that its coming values are not known."
                f" {_BY_HAND}"
            )
        if "step" in vars(part) or class_of(part).step not in _KNOWN_STEPS:
            raise UnsupportedError(
                f"{_name(part)} has a step() of its own, which may do more than set rates and so"
                f" cannot run ahead. {_BY_HAND}"
            )
        if part.optimizer is not optimizer:
            raise UnsupportedError(
                f"{_name(part)} belongs to another optimizer than the {type(optimizer).__name__}"
                " that steps. Pass the two that belong together."
            )
    if tensors := [
        key
        for group in groups_of(optimizer)
        for key in scheduled_keys(scheduler)
        if isinstance(group[key], torch.Tensor)
    ]:
        raise UnsupportedError(
            f"group[{tensors[0]!r}] is a tensor. Make the optimizer with a float: the schedule"
            " brings it to the device."
        )


def parts(scheduler: lr_scheduler.LRScheduler) -> Iterator[lr_scheduler.LRScheduler]:
    """A scheduler and those that it is made of."""
    yield scheduler
    for part in vars(scheduler).get("_schedulers", ()):
        yield from parts(part)


def _name(scheduler: lr_scheduler.LRScheduler) -> str:
    return type(scheduler).__name__
