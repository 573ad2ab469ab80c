"""Step an optimizer: torch's `found_inf` protocol, schedulers, optimizers that wrap others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.lr_scheduler import LRScheduler

from mezzo import _launch
from mezzo._errors import ScalerError
from mezzo.scaling.loss_scales import FusedStepProtocol, binding_of
from mezzo.scaling.mesh import any_sharded
from mezzo.scaling.schedule_lookahead import check_scheduler, scheduled_keys
from mezzo.scaling.schedule_sync import catch_up, groups_of, is_synced_on_read, stop_sync

if TYPE_CHECKING:
    from mezzo.scaling.device_schedule import DeviceSchedule

Optimizer = torch.optim.Optimizer

# -- optimizers that wrap others -------------------------------------------------------------------

_STANDARD_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})
"""Attributes that every optimizer has, and that hold tensors and numbers."""


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that an optimizer wraps, and those that they wrap, by path.

    Searches attributes, and lists, tuples, sets and dictionaries in them.

    >>> outer, inner = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    >>> outer.parts = {"first": inner}
    >>> list(inner_optimizers(outer))
    [".parts['first']"]
    """
    found: dict[str, Optimizer] = {}
    _collect(optimizer, "", found, {id(optimizer)})
    return found


def bindings_of(optimizer: Optimizer) -> list[FusedStepProtocol]:
    """Return the binding of an optimizer, or the bindings of the optimizers that it wraps."""
    binding = binding_of(optimizer)
    if binding is not None:
        return [binding]
    if type(optimizer).__module__.startswith("torch.optim."):
        # No search at every step: torch's optimizers wrap none.
        return []
    bindings = map(binding_of, inner_optimizers(optimizer).values())
    return [binding for binding in bindings if binding is not None]


def _collect(optimizer: Optimizer, path: str, found: dict[str, Optimizer], seen: set[int]) -> None:
    for name, value in vars(optimizer).items():
        if name not in _STANDARD_ATTRIBUTES:
            for rest, inner in _optimizers_in(value, "", seen):
                # Prefer a property without the underscore that returns the same optimizer.
                public = name.lstrip("_")
                is_public = (
                    public != name and not rest and getattr(optimizer, public, None) is inner
                )
                inner_path = f"{path}.{public if is_public else name}{rest}"
                found[inner_path] = inner
                _collect(inner, inner_path, found, seen)


def _optimizers_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Optimizer]]:
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        entries = list(enumerate(value))
    elif not isinstance(value, Optimizer):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        yield path, value
    for key, entry in entries:
        yield from _optimizers_in(entry, f"{path}[{key!r}]", seen)


# -- torch's protocol ------------------------------------------------------------------------------


def refuse_closures(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `ScalerError` if a closure is passed, by position or by keyword."""
    closure = (
        kwargs.get("closure")
        if "closure" in kwargs
        else next((argument for argument in args if callable(argument)), None)
    )
    if closure is not None:
        # A partial function names its function. Its repr would print the batch that it holds.
        function = getattr(closure, "func", closure)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ScalerError(
            f"step() takes no closure, got {name}: it would compute new gradients that are"
            " neither unscaled nor checked. Compute the loss and its gradients first, then step."
        )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads `found_inf` itself, by torch's protocol.

    Not on a CPU: nothing synchronizes there, and torch's fused steps are faster without it.
    """
    if binding_of(optimizer) is not None:
        return True
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not type(optimizer).__module__.startswith("torch.optim."):
        # A wrapper may forward this attribute from its optimizer without passing on the scale and
        # the flag.
        return not inner_optimizers(optimizer)
    owned = [parameter for group in groups_of(optimizer) for parameter in group["params"]]
    # torch's fused steps do not take the plain flag of a scaler together with DTensors.
    return not owned or (_launch.needs_sync(owned[0].device) and not any_sharded(owned))


def takes_grad_scaler(optimizer: Optimizer) -> bool:
    """Return whether `step` has a `grad_scaler` argument, the deprecated form of the protocol."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    takes = _takes_grad_scaler.get(step)
    if takes is None:
        takes = _takes_grad_scaler[step] = "grad_scaler" in inspect.signature(step).parameters
    if takes:
        # The stack level of the line that called the scaler's step().
        warnings.warn(
            f"{type(optimizer).__name__}.step(grad_scaler=...) is an old form of torch's protocol."
            " Read self.grad_scale and self.found_inf instead.",
            FutureWarning,
            stacklevel=3,
        )
    return takes


_takes_grad_scaler: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Cache of `takes_grad_scaler`: reading a signature costs 20 µs. Weak, since the step of a
decorated optimizer holds its model and masters."""


@contextmanager
def scaling_info(
    optimizer: Any, scale: torch.Tensor, found_inf: torch.Tensor, *, unscaled: bool
) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` on an optimizer inside the block, as torch's scaler does."""
    before = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = before if unscaled else (scale if before is None else scale * before)
    optimizer.found_inf = found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


# -- schedulers ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    """A scheduler whose schedule runs on the device."""

    scheduler: LRScheduler
    schedule: DeviceSchedule
    good: torch.Tensor
    """Successful steps of the optimizer since the schedule started, on the device."""


class Schedules:
    """The device schedule of each optimizer that was stepped with a scheduler."""

    def __init__(self) -> None:
        self._running: dict[Optimizer, _Running] = {}
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
                advance(optimizer, scheduler)
            return
        running = self._running_for(optimizer, scheduler, found_inf.device)
        with running.schedule.values_applied(running.good):
            yield
        running.good.add_(found_inf == 0)

    def before_replay(self) -> tuple[int, ...]:
        """Do the host work before a replay; return the addresses of the tables that it reads."""
        # Runs at every replay, mostly without a schedule.
        if not self._running:
            return ()
        for optimizer, last in self._running.items():
            running = self._running_for(optimizer, last.scheduler, last.good.device)
            running.schedule.before_replay(running.good)
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
    ) -> _Running:
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


def advance(optimizer: Optimizer, scheduler: LRScheduler) -> None:
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


def _start(optimizer: Optimizer, scheduler: LRScheduler, device: torch.device) -> _Running:
    # Imported when a scheduler is first passed, which most users never do.
    from mezzo.scaling.device_schedule import DeviceSchedule  # noqa: PLC0415

    # An earlier schedule brings the optimizer up to date first.
    stop_sync(optimizer)
    good = torch.zeros((), dtype=torch.int64, device=device)
    schedule = DeviceSchedule(optimizer, scheduler, device)
    schedule.reconcile_when_read(lambda: int(good))
    return _Running(scheduler, schedule, good)
