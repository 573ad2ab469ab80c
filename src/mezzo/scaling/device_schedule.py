"""A schedule that does not advance on a skipped step, without a synchronization.

The learning rates of the next successful steps (and momenta or betas, if the scheduler cycles them)
lie in a table on the device. Each step reads its row by the device's count of successful steps. The
host gets that count a few steps late, from asynchronous copies, and refills the table in time.

The user's scheduler and the optimizer's groups lag behind, and are brought up to date when they are
read: `optimizer.param_groups`, a state dict, `get_last_lr()`. Only reads of a group that was kept
from an earlier read (`group = optimizer.param_groups[0]`) are not noticed: it shows the rate of the
last update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import lr_scheduler

from mezzo import _launch
from mezzo._errors import UnsupportedError
from mezzo.scaling.loss_scales import binding_of
from mezzo.scaling.schedule_lookahead import (
    AHEAD,
    Lookahead,
    Row,
    check_kind,
    flat,
    parts,
    scheduled_keys,
    spread,
)
from mezzo.scaling.schedule_sync import LaggingSchedule, groups_of, sync_on_read

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of torch whose fused steps take a learning rate on a CUDA device and never read it
on the host (seen on 2.11). None of them takes betas or a momentum as tensors (2.11, 2.13)."""


class DeviceSchedule(LaggingSchedule):
    """The future values of a scheduler as a table on a device.

    `good` is the number of successful steps before the table starts, `length` the number of rows.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    >>> with schedule.values_applied(torch.tensor(2)):
    ...     optimizer.param_groups[0]["lr"]
    tensor(0.2500)
    >>> optimizer.param_groups[0]["lr"]
    1.0
    >>> schedule.reconcile(2)
    >>> scheduler.get_last_lr()
    [0.25]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: lr_scheduler.LRScheduler,
        device: torch.device | str,
        length: int = AHEAD,
        *,
        good: int = 0,
    ) -> None:
        check_kind(optimizer, scheduler)
        if length < 1:
            raise UnsupportedError(f"length={length}: a table of future steps has at least one.")
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._device = torch.device(device)
        self._keys = scheduled_keys(scheduler)
        if _launch.needs_sync(self._device):
            _check_reads_on_device(optimizer, self._keys)
        self._length = length
        # float32 is what torch's fused kernels read.
        self._table = torch.empty((0, 0), dtype=torch.float32, device=self._device)
        self._base = torch.empty((), dtype=torch.int64, device=self._device)
        self._count: Callable[[], int] = lambda: self._reconciled
        self._pending = False
        """Whether a step was taken since the scheduler was last stepped."""
        self._changed = False
        """Whether the user changed the scheduler since."""
        self._restart(good)

    # -- at every step -----------------------------------------------------------------------------

    @contextmanager
    def values_applied(self, good: torch.Tensor) -> Iterator[None]:
        """Put the values of this step into the optimizer's groups inside the block.

        `good` counts the successful steps before this one, on the device.
        """
        if not _launch.is_capturing(self._device):
            self.before_replay(good)
        groups, before = groups_of(self._optimizer), self._group_values()
        spread(iter(self._on_device_at(good)), groups, self._keys)
        try:
            # A hook of the optimizer that reads the scheduler must not step it on these tensors.
            with self.without_sync():
                yield
        finally:
            spread(iter(before), groups, self._keys)

    @property
    def address(self) -> int:
        """The address of the table, which a captured step reads."""
        return self._table.data_ptr()

    def before_replay(self, good: torch.Tensor) -> None:
        """Do the host work before a step, or before the replay of a captured one."""
        if self._changed or self._group_values() != self._last_values:
            # The step of the change is known, unless a group that was kept from an earlier read was
            # changed: then synchronize once.
            self.reconcile(int(good) if self._pending else self._reconciled)
        self._prepare(good)
        self._pending = True

    # -- when it is read ---------------------------------------------------------------------------

    def reconcile(self, good: int) -> None:
        """Step the user's scheduler once for each successful step since the last time.

        `good` counts all successful steps. Values that the user set since then stay.
        """
        self._pending = False
        with self.without_sync():
            now = self._group_values()
            if not self._changed and now == self._last_values:
                self._advance(good)
                return
            if len(now) == len(self._last_values):
                self._advance_before_change(good, now)
            else:
                self._advance(good)
            self._restart(good)

    def reconcile_when_read(self, count: Callable[[], int]) -> None:
        """Reconcile whenever the scheduler or the groups are read.

        `count` returns the number of successful steps, and may synchronize.
        """
        self._count = count
        sync_on_read(self._optimizer, parts(self._scheduler), self)

    def catch_up(self) -> None:
        """Reconcile if a step was taken since the last time. This synchronizes."""
        if self._pending:
            self.reconcile(self._count())

    def changed(self) -> None:
        """Restart at the next step, since the user changed the scheduler."""
        self._changed = True

    # -- private -----------------------------------------------------------------------------------

    def _restart(self, good: int) -> None:
        """Restart from the current values of the scheduler and the groups."""
        self._ahead = Lookahead(self._optimizer, self._scheduler, self._keys, good)
        self._reconciled = self._known = good
        self._last_values = self._group_values()
        """The values of the groups when the scheduler was last stepped."""
        self._pending = self._changed = False
        # Calls since the count was `_known`, and how many of them came before the running copy.
        self._calls = self._calls_at_copy = 0
        self._copy: _launch.AsyncCopy | None = None
        self._fill(self._length)

    def _group_values(self) -> Row:
        return flat(groups_of(self._optimizer), self._keys)

    def _advance(self, good: int) -> None:
        # Assigned first, so that an error of the scheduler is raised once, as by its own step().
        due, self._reconciled = good - self._reconciled, good
        try:
            with warnings.catch_warnings():
                # The optimizer has stepped; torch counts calls of a wrapper, and would warn.
                warnings.filterwarnings("ignore", message=".*`optimizer.step\\(\\)`")
                for _ in range(due):
                    self._scheduler.step()
        finally:
            self._last_values = self._group_values()

    def _advance_before_change(self, good: int, now: Row) -> None:
        """Advance from the values before the user changed some, and set those again."""
        groups, before = groups_of(self._optimizer), self._last_values
        spread(iter(before), groups, self._keys)
        try:
            self._advance(good)
        finally:
            advanced = zip(before, now, self._last_values, strict=True)
            values = [due if new == old else new for old, new, due in advanced]
            spread(iter(values), groups, self._keys)

    def _on_device_at(self, good: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = (good - self._base).clamp_(0, len(self._table) - 1)
        return self._table.index_select(0, index.reshape(1))[0].unbind()

    def _prepare(self, good: torch.Tensor) -> None:
        """Refill the table if the device may reach its end."""
        if self._copy is not None and self._copy.arrived():
            self._known, self._copy = int(self._copy.values()[0]), None
            self._calls -= self._calls_at_copy
            self._ahead.raise_beyond_end(self._known)
        # Each call since then was at most one successful step.
        reach, size = self._known + self._calls, len(self._table)
        if self._copy is None and reach - self._filled >= size // 4:
            self._copy, self._calls_at_copy = _launch.AsyncCopy(good.reshape(1)), self._calls
        if reach - self._filled >= size // 2:
            # A host that is far ahead gets a longer table, rather than a synchronization.
            while reach - self._known >= size // 2:
                size *= 2
            self._fill(size)
        self._calls += 1

    def _fill(self, size: int) -> None:
        """Fill the table from the last known step on.

        In place if it has this size, so that a captured step finds it at its address.
        """
        self._filled = self._known
        self._ahead.extend(self._known, self._known + size)
        rows = torch.tensor(
            [self._ahead.row(self._known + step) for step in range(size)], dtype=self._table.dtype
        )
        if rows.shape != self._table.shape:
            self._table = torch.empty_like(rows, device=self._device)
        self._table.copy_(_launch.pinned_for(self._table.device, rows), non_blocking=True)
        self._base.fill_(self._known)


def _check_reads_on_device(optimizer: torch.optim.Optimizer, keys: tuple[str, ...]) -> None:
    """Raise `UnsupportedError` if an optimizer would read scheduled values on the host."""
    binding = binding_of(optimizer)
    if binding is not None and binding.device_values.issuperset(keys):
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(
        optimizer, _FUSED
    ):
        # Not torch's, but it skips by itself: assume that it reads on the device.
        return
    name = type(optimizer).__name__
    remedy = (
        "Or step the scheduler yourself: `if not result.skipped: scheduler.step()`, which"
        " synchronizes once per step."
    )
    if len(keys) > 1:
        raise UnsupportedError(
            f"The scheduler cycles {keys[1]}, which torch's {name} reads on the host: every step"
            f" would synchronize. Pass cycle_momentum=False to the scheduler. {remedy}"
        )
    for group in groups_of(optimizer):
        if not (isinstance(optimizer, _FUSED) and group.get("fused")):
            fused = ", ".join(kind.__name__ for kind in _FUSED)
            raise UnsupportedError(
                f"This {name} reads its learning rate on the host: every step would synchronize."
                f" Use a fused optimizer ({fused}, with fused=True). {remedy}"
            )
