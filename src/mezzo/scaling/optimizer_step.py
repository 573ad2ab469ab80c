"""Ways to step an optimizer: torch's `found_inf` protocol, schedulers, optimizers that wrap another one."""

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
from mezzo.scaling.schedule_lookahead import check
from mezzo.scaling.schedule_sync import catch_up, groups_of, is_synced_on_read, stop_sync

Optimizer = torch.optim.Optimizer

_OWN = frozenset({"state", "param_groups", "defaults"})
"""Attributes that every optimizer has, and that hold tensors and numbers."""


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers among the attributes of an optimizer and of those, by the path to each; lists, tuples, sets and dictionaries are looked into.

    >>> outer, inner = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    >>> outer.parts = {"first": inner}
    >>> list(inner_optimizers(outer))
    [".parts['first']"]
    """
    found: dict[str, Optimizer] = {}
    _collect(optimizer, "", found, {id(optimizer)})
    return found


def bindings_of(optimizer: Optimizer) -> list[FusedStepProtocol]:
    """What the step of an optimizer was bound to, or the steps of those that it wraps."""
    own = binding_of(optimizer)
    if own is not None:
        return [own]
    if type(optimizer).__module__.startswith("torch.optim."):
        # Asked at every step: torch's own wrap nothing.
        return []
    return [
        bound
        for inner in inner_optimizers(optimizer).values()
        if (bound := binding_of(inner)) is not None
    ]


def _collect(optimizer: Optimizer, path: str, found: dict[str, Optimizer], seen: set[int]) -> None:
    for name, value in vars(optimizer).items():
        if name not in _OWN:
            for rest, inner in _optimizers_in(value, "", seen):
                # The public name of what is also an attribute without the underscore.
                public = name.lstrip("_")
                named = (
                    public
                    if public != name and not rest and getattr(optimizer, public, None) is inner
                    else name
                )
                found[f"{path}.{named}{rest}"] = inner
                _collect(inner, f"{path}.{named}{rest}", found, seen)


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
    for key, one in entries:
        yield from _optimizers_in(one, f"{path}[{key!r}]", seen)


if TYPE_CHECKING:
    from mezzo.scaling.device_schedule import DeviceSchedule


def refuse_closures(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a closure however it is passed."""
    passed = (
        kwargs.get("closure")
        if "closure" in kwargs
        else next((argument for argument in args if callable(argument)), None)
    )
    if passed is not None:
        raise ScalerError(
            f"step() takes no closure, got {passed!r}: it would compute new gradients that nobody"
            " unscales or checks. Compute the loss and its gradients first, then step."
        )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes part in torch's protocol. On a CPU there is nothing to wait for, and torch's fused steps are faster without it."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if binding_of(optimizer) is not None:
        return True
    if not type(optimizer).__module__.startswith("torch.optim."):
        # A wrapper shows the attributes of the optimizer that it wraps, which would not be given
        # the scale and the flag.
        return not inner_optimizers(optimizer)
    first = next(
        (parameter for group in groups_of(optimizer) for parameter in group["params"]), None
    )
    return first is None or _launch.needs_sync(first.device)


def takes_grad_scaler(optimizer: Optimizer) -> bool:
    """Whether an optimizer asks for the scaler itself, an older form of the protocol that torch is giving up."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    taken = _taking.get(step)
    if taken is None:
        taken = _taking[step] = "grad_scaler" in inspect.signature(step).parameters
    if taken:
        # Seen from the line that called the scaler's step().
        warnings.warn(
            f"{type(optimizer).__name__}.step(grad_scaler=...) is an old form of torch's protocol."
            " Read self.grad_scale and self.found_inf instead.",
            FutureWarning,
            stacklevel=4,
        )
    return taken


_taking: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Steps, and whether they take the scaler: asking for a signature costs 20 µs. Weak, since the
step of a decorated optimizer holds its model and masters."""


@contextmanager
def scaling_info(
    optimizer: Any, scale: torch.Tensor, found: torch.Tensor, *, unscaled: bool
) -> Iterator[None]:
    """Let an optimizer know the scale of its gradients and whether they are finite, as torch's protocol has it."""
    before = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = before if unscaled else (scale if before is None else scale * before)
    optimizer.found_inf = found
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


@dataclass(slots=True)
class _Running:
    scheduler: LRScheduler
    schedule: DeviceSchedule
    good: torch.Tensor
    """Good steps of the optimizer since, on the device."""


class Schedules:
    """The schedules that run on a device, for each optimizer that was stepped with a scheduler."""

    def __init__(self) -> None:
        self._running: dict[Optimizer, _Running] = {}
        self._accepted: WeakSet[LRScheduler] = WeakSet()

    def accept(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Refuse a scheduler that cannot be stepped with an optimizer, before anything is updated."""
        if scheduler not in self._accepted or scheduler.optimizer is not optimizer:
            check(optimizer, scheduler)
            self._accepted.add(scheduler)

    @contextmanager
    def applied(
        self, optimizer: Optimizer, scheduler: LRScheduler, found: torch.Tensor
    ) -> Iterator[None]:
        """Step with the values that the scheduler has for this step; it advances unless the flag says that the step was skipped."""
        if not _defers(optimizer, found.device):
            yield
            if not bool(found):
                advance(optimizer, scheduler)
            return
        running = self._in_charge(optimizer, scheduler, found.device)
        with running.schedule.applied(running.good):
            yield
        running.good.add_(found == 0)

    def before_replay(self) -> tuple[int, ...]:
        """What the host does before a captured step runs again; where the tables lie that it reads."""
        # Asked at every step, and mostly there is none.
        if not self._running:
            return ()
        for optimizer, last in self._running.items():
            running = self._in_charge(optimizer, last.scheduler, last.good.device)
            running.schedule.before_replay(running.good)
        return self.tables()

    def tables(self) -> tuple[int, ...]:
        """Where the tables of coming values lie."""
        return tuple([running.schedule.address for running in self._running.values()])

    def reconcile(self) -> None:
        """Let schedulers and optimizers catch up with the device; this waits for it if a step was taken since the last time."""
        for optimizer in self._running:
            catch_up(optimizer)

    def _in_charge(
        self, optimizer: Optimizer, scheduler: LRScheduler, device: torch.device
    ) -> _Running:
        """What runs this scheduler; begun anew where another scheduler, or another scaler, has stepped the optimizer since."""
        running = self._running.get(optimizer)
        if (
            running is None
            or running.scheduler is not scheduler
            or not is_synced_on_read(optimizer, running.schedule)
        ):
            running = self._running[optimizer] = _start(optimizer, scheduler, device)
        return running


def advance(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Step a scheduler after a step that the host knows to be good."""
    # Another scaler may have stepped it on a device before.
    stop_sync(optimizer)
    scheduler.step()


def _defers(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether only the device knows if a step was skipped."""
    bound = binding_of(optimizer)
    # A bound step that reads on the host waits for the flag itself.
    return _launch.needs_sync(device) and (bound is None or bound.reads_on_device)


def _start(optimizer: Optimizer, scheduler: LRScheduler, device: torch.device) -> _Running:
    # Most never pass a scheduler.
    from mezzo.scaling.device_schedule import DeviceSchedule  # noqa: PLC0415

    # What another schedule has yet to do comes first.
    stop_sync(optimizer)
    good = torch.zeros((), dtype=torch.int64, device=device)
    schedule = DeviceSchedule(optimizer, scheduler, device)
    schedule.reconcile_when_read(lambda: int(good))
    return _Running(scheduler, schedule, good)
