"""What happened, as values: mechanisms emit events, reports consume them, and neither knows the other.

Emitting costs nothing when nobody listens: a mechanism asks `listening()` before it builds a
record.

>>> with listen() as heard:
...     emit(PolicyDowngraded("bfloat16", "float32", "cpu", "no kernels"))
>>> heard[0].used
'float32'
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. Every record is frozen and made of plain data, so that it can be stored and shown anywhere."""


@dataclass(frozen=True, slots=True)
class HardwareDetected(Event):
    """A device was asked what it can do."""

    device: str
    name: str
    fast: tuple[str, ...]
    """The 16-bit dtypes that the device computes natively."""


@dataclass(frozen=True, slots=True)
class PolicyResolved(Event):
    """A policy met a device: `dtype="auto"` and the like became facts."""

    policy: str
    device: str
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyDowngraded(Event):
    """The device lacks what the policy asked for, and something else is used."""

    asked: str
    used: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class OpCastOverridden(Event):
    """An op ran in a precision that the policy chose, not torch's own lists."""

    op: str
    rule: str
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class Float32Fallback(Event):
    """An op has no 16-bit kernel on the device and ran in float32 instead of failing."""

    op: str
    device: str
    asked: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleCollapsed(Event):
    """The loss scale reached its floor, or too many steps in a row were skipped."""

    scale: float
    consecutive_skips: int
    message: str


@dataclass(frozen=True, slots=True)
class ScalingNotNeeded(Event):
    """A loss is scaled whose dtype does not need it."""

    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepCaptured(Event):
    """A whole step became one program that the device replays."""

    shapes: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StepNotCaptured(Event):
    """A step runs eagerly that was to be captured."""

    reason: str


@dataclass(frozen=True, slots=True)
class UpdatesSkipped(Event):
    """Several updates in a row were skipped, rightly: a gradient is not finite in eager mode too."""

    in_a_row: int
    scale: float
    parameter: str
    """The first one with a non-finite gradient."""


@dataclass(frozen=True, slots=True)
class CaptureDisagrees(Event):
    """A captured step skipped an update that the eager one applies, or the other way round; steps run eagerly from then on."""

    skipped: bool
    """What the captured step did."""
    parameter: str | None
    """The first one with a non-finite gradient in eager mode."""


@dataclass(frozen=True, slots=True)
class LayoutChosen(Event):
    """A convolutional model was given a memory layout, or left in its own."""

    channels_last: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GraphConverted(Event):
    """A model was converted for inference."""

    model: str
    dtype: str
    casts_before: int
    """What torch.autocast would cast in one call."""
    casts_after: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LossNotFinite(Event):
    """A loss was NaN or infinite; it was seen a few steps late."""

    loss: float
    skipped: bool
    """Whether a scaler looks at the gradients and skips such steps."""


Sink = Callable[[Event], None]

_lock = threading.Lock()
_sinks: tuple[Sink, ...] = ()


def listening() -> bool:
    """Whether anybody wants events; false is the common case and decides that no record is built."""
    return bool(_sinks)


def emit(event: Event) -> None:
    """Hand an event to everybody who listens. What a listener raises reaches the caller: a report that breaks is not hidden."""
    for sink in _sinks:
        sink(event)


@contextmanager
def listen(sink: Sink | None = None) -> Iterator[list[Event]]:
    """Receive the events of the whole process while the block runs; without a sink of your own they collect in the list."""
    global _sinks
    heard: list[Event] = []
    receive = sink or heard.append

    # A fresh object for each region: the same function may listen twice, and each leaves alone.
    def own(event: Event) -> None:
        receive(event)

    with _lock:
        _sinks = (*_sinks, own)
    try:
        yield heard
    finally:
        with _lock:
            _sinks = tuple(one for one in _sinks if one is not own)
