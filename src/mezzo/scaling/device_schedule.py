"""A schedule that does not advance on a skipped step, without asking the device which steps were skipped.

The learning rates of the coming good steps (and momenta or betas, where the scheduler cycles them)
lie in a table on the device, and each step looks its own up by the device's count of good steps.
The host learns that count a few steps late, from copies that it never waits for, and fills the
table in time. The user's scheduler object and the optimizer's groups stay behind, and catch up when
they are read: `optimizer.param_groups`, a state dict, `get_last_lr()`. Only a group that was kept
from an earlier read (`group = optimizer.param_groups[0]`) is not seen to be read: it shows the rate
of the last read of the others.
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
    flat,
    parts,
    refuse,
    scheduled_keys,
    spread,
)
from mezzo.scaling.schedule_sync import groups_of, sync_on_read, without_sync

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""The optimizers of torch whose fused steps take a learning rate from a CUDA device and never
read it (seen on 2.11). None takes betas or a momentum so (2.11, 2.13)."""


class DeviceSchedule:
    """The coming values of a scheduler as a table on a device; `good` good steps are behind it when it is made.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    >>> with schedule.applied(torch.tensor(2)):
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
        refuse(optimizer, scheduler)
        if length < 1:
            raise UnsupportedError(
                f"length={length}: a table of the coming steps has at least one."
            )
        self.paused = False
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._device = torch.device(device)
        self._keys = scheduled_keys(scheduler)
        if _launch.needs_sync(self._device):
            _refuse_host_reads(optimizer, self._keys)
        self._length = length
        # float32 is what torch's fused kernels read.
        self._table = torch.empty((0, 0), dtype=torch.float32, device=self._device)
        self._base = torch.empty((), dtype=torch.int64, device=self._device)
        self._count: Callable[[], int] = lambda: self._reconciled
        self._pending = False
        """Whether a step was taken since the scheduler was last stepped."""
        self._changed = False
        """Whether the scheduler was changed by hand since."""
        self._restart(good)

    # -- at every step -----------------------------------------------------------------------------

    @contextmanager
    def applied(self, good: torch.Tensor) -> Iterator[None]:
        """Put the values of this step into the optimizer's groups while it steps. `good`, on the device, counts the good steps before this one."""
        if not _launch.is_capturing(self._device):
            self.before_replay(good)
        groups, before = groups_of(self._optimizer), self._look()
        spread(iter(self._on_device_at(good)), groups, self._keys)
        try:
            # A hook of the optimizer that reads the scheduler must not step it on these tensors.
            with without_sync(self):
                yield
        finally:
            spread(iter(before), groups, self._keys)

    @property
    def address(self) -> int:
        """Where the table lies."""
        return self._table.data_ptr()

    def before_replay(self, good: torch.Tensor) -> None:
        """What the host does before a step, or before one that was captured runs again."""
        if self._changed or self._look() != self._seen:
            # At which step that was is known, unless a group that was kept from an earlier read was
            # changed: that is worth one wait.
            self.reconcile(int(good) if self._pending else self._reconciled)
        self._prepare(good)
        self._pending = True

    # -- when it is read ---------------------------------------------------------------------------

    def reconcile(self, good: int) -> None:
        """Step the real scheduler as often as good steps happened since the last time, so that it and the groups show what is true."""
        self._pending = False
        with without_sync(self):
            now = self._look()
            if not self._changed and now == self._seen:
                self._advance(good)
                return
            if len(now) == len(self._seen):
                # A rate was set by hand: what the scheduler had yet to do came before.
                groups, before = groups_of(self._optimizer), self._seen
                spread(iter(before), groups, self._keys)
                try:
                    self._advance(good)
                finally:
                    spread(
                        iter(
                            [
                                due if new == old else new
                                for old, new, due in zip(before, now, self._seen, strict=True)
                            ]
                        ),
                        groups,
                        self._keys,
                    )
            else:
                self._advance(good)
            self._restart(good)

    def reconcile_when_read(self, count: Callable[[], int]) -> None:
        """Let scheduler and groups catch up by themselves whenever they are read. `count` gives the good steps, and may wait for them."""
        self._count = count
        sync_on_read(self._optimizer, parts(self._scheduler), self)

    def catch_up(self) -> None:
        """Reconcile if a step was taken since the last time; this waits for it."""
        if self._pending:
            self.reconcile(self._count())

    def changed(self) -> None:
        """Begin anew at the next step, since the scheduler was changed by hand."""
        self._changed = True

    # -- inside ------------------------------------------------------------------------------------

    def _restart(self, good: int) -> None:
        """Begin anew from what the scheduler and the groups are now."""
        self._ahead = Lookahead(self._optimizer, self._scheduler, self._keys, good)
        self._reconciled = self._known = good
        self._seen = self._look()
        """What the groups held when the scheduler was last stepped."""
        self._pending = self._changed = False
        # Calls since the count was as known, and how many of them when the copy on its way was
        # made.
        self._calls = self._asked = 0
        self._copy: _launch.AsyncCopy | None = None
        self._fill(self._length)

    def _look(self) -> Row:
        return flat(groups_of(self._optimizer), self._keys)

    def _advance(self, good: int) -> None:
        # Noted first: an error of the scheduler is raised once, as by its own step().
        due, self._reconciled = good - self._reconciled, good
        try:
            with warnings.catch_warnings():
                # The count says that the optimizer has stepped; torch looks for calls of a wrapper,
                # and warns without.
                warnings.filterwarnings("ignore", message=".*`optimizer.step\\(\\)`")
                for _ in range(due):
                    self._scheduler.step()
        finally:
            self._seen = self._look()

    def _on_device_at(self, good: torch.Tensor) -> tuple[torch.Tensor, ...]:
        place = (good - self._base).clamp_(0, len(self._table) - 1)
        return self._table.index_select(0, place.reshape(1))[0].unbind()

    def _prepare(self, good: torch.Tensor) -> None:
        """See to it that the table holds this step, wherever the device is."""
        if self._copy is not None and self._copy.arrived():
            self._known, self._copy = int(self._copy.values()[0]), None
            self._calls -= self._asked
            self._ahead.refuse_beyond_end(self._known)
        # Every call since was one good step at most.
        reach, size = self._known + self._calls, len(self._table)
        if self._copy is None and reach - self._filled >= size // 4:
            self._copy, self._asked = _launch.AsyncCopy(good.reshape(1)), self._calls
        if reach - self._filled >= size // 2:
            # A host that is far ahead gets a longer table: better than to wait for the count.
            while reach - self._known >= size // 2:
                size *= 2
            self._fill(size)
        self._calls += 1

    def _fill(self, size: int) -> None:
        """Fill the table from the last known step on: in place where it fits, so that a captured step finds it where it was."""
        self._filled = self._known
        self._ahead.extend(self._known, self._known + size)
        rows = torch.tensor(
            [self._ahead.row(self._known + step) for step in range(size)], dtype=self._table.dtype
        )
        if rows.shape != self._table.shape:
            self._table = torch.empty_like(rows, device=self._device)
        self._table.copy_(_launch.pinned_for(self._table.device, rows), non_blocking=True)
        self._base.fill_(self._known)


def _refuse_host_reads(optimizer: torch.optim.Optimizer, keys: tuple[str, ...]) -> None:
    bound = binding_of(optimizer)
    if bound is not None and bound.reads_on_device:
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(
        optimizer, _FUSED
    ):
        # Another optimizer that skips by itself: what it needs it reads on the device.
        return
    name, by_hand = (
        type(optimizer).__name__,
        (
            "Or step the scheduler yourself: `if not result.skipped: scheduler.step()`, which waits"
            " once a step."
        ),
    )
    if len(keys) > 1:
        raise UnsupportedError(
            f"The scheduler cycles {keys[1]}, which torch's {name} reads on the host: every step"
            f" would wait for the device. Pass cycle_momentum=False to it. {by_hand}"
        )
    for group in groups_of(optimizer):
        if not (isinstance(optimizer, _FUSED) and group.get("fused")):
            raise UnsupportedError(
                f"{name} as it is set up reads its learning rate on the host: every step would wait"
                " for the device. Use a fused optimizer"
                f" ({', '.join(kind.__name__ for kind in _FUSED)}, with fused=True). {by_hand}"
            )
