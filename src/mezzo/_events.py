"""Events: records of what mezzo decided, for reports.

Code that decides emits an event, a report listens, and neither imports the other. Without a
listener an event costs nothing: check `listening()` before building a record.

>>> with listen() as events:
...     emit(PolicyDowngraded("bfloat16", "float32", "cpu", "no kernels"))
>>> events[0].used
'float32'
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events: frozen records of plain data that can be stored and shown."""


@dataclass(frozen=True, slots=True)
class HardwareDetected(Event):
    """`hardware()` was called for a device."""

    device: str
    name: str
    native_dtypes: tuple[str, ...]
    """The 16-bit dtypes that the device computes natively."""


@dataclass(frozen=True, slots=True)
class PolicyResolved(Event):
    """A policy was resolved for a device, which decides what `dtype="auto"` means."""

    policy: str
    device: str
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyDowngraded(Event):
    """The device does not support the dtype of the policy, and another one is used."""

    asked: str
    """The dtype of the policy."""
    used: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class OpCastOverridden(Event):
    """The policy overrode torch's own lists for an op."""

    op: str
    rule: str
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class Float32Fallback(Event):
    """An op has no 16-bit kernel on the device, and ran in float32 instead of failing."""

    op: str
    device: str
    asked: str
    """The dtype of the policy."""
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleCollapsed(Event):
    """The loss scale reached its floor, or too many steps in a row were skipped."""

    scale: float
    consecutive_skips: int
    message: str


@dataclass(frozen=True, slots=True)
class ScalingNotNeeded(Event):
    """A loss is scaled although its dtype does not need loss scaling."""

    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepCaptured(Event):
    """A training or evaluation step was captured as a CUDA graph."""

    shapes: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StepNotCaptured(Event):
    """A step cannot be captured as a CUDA graph and runs eagerly."""

    reason: str


@dataclass(frozen=True, slots=True)
class UpdatesSkipped(Event):
    """Several steps in a row were skipped; run eagerly, the gradients are not finite either."""

    in_a_row: int
    scale: float
    parameter: str
    """Name of the first parameter with a non-finite gradient."""


@dataclass(frozen=True, slots=True)
class CaptureDisagrees(Event):
    """A replayed step skipped an update that the eager step applies, or applied a skipped one.

    From then on steps run eagerly.
    """

    skipped: bool
    """Whether the replayed step skipped the update."""
    parameter: str | None
    """Name of the first parameter with a non-finite gradient in the eager step."""


@dataclass(frozen=True, slots=True)
class LayoutChosen(Event):
    """The memory format of a convolutional model was chosen."""

    channels_last: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GraphConverted(Event):
    """A model was converted for inference."""

    model: str
    dtype: str
    casts_before: int
    """Casts in one call under torch.autocast."""
    casts_after: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LossNotFinite(Event):
    """A loss was NaN or infinite. On CUDA this is noticed a few steps late."""

    loss: float
    skipped: bool
    """Whether a GradScaler checks the gradients and skips such steps."""


Sink = Callable[[Event], None]

_lock = threading.Lock()
_sinks: tuple[Sink, ...] = ()


def listening() -> bool:
    """Return whether there is a listener; without one, do not build a record."""
    return bool(_sinks)


def emit(event: Event) -> None:
    """Pass an event to every listener. An exception of a listener propagates to the caller."""
    for sink in _sinks:
        sink(event)


@contextmanager
def listen(sink: Sink | None = None) -> Iterator[list[Event]]:
    """Receive the events of all threads while the block runs, in the list or through `sink`."""
    global _sinks
    events: list[Event] = []
    receive = sink or events.append

    # A new function for each region, so that one sink can be registered twice and each exit removes
    # its own registration.
    def registered(event: Event) -> None:
        receive(event)

    with _lock:
        _sinks = (*_sinks, registered)
    try:
        yield events
    finally:
        with _lock:
            _sinks = tuple(sink for sink in _sinks if sink is not registered)
