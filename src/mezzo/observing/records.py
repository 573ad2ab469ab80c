"""Frozen records of an observed run, and the lines of its log that they are written as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mezzo._events import Event
from mezzo.scaling.gradient_counts import Counts

VERSION = 1
"""Version of the log's format."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a log."""

    kind: ClassVar[str] = ""
    """Name of the kind of record in the log."""
    step: int | None = None
    """Number of the call, from 1; None if the record belongs to no call."""
    time: float = 0.0
    """Seconds since the run began."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data for one line of JSON."""
        # Not `asdict`, which copies deeply and takes five times as long.
        return {"kind": self.kind, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Record):
    """The first line of a log: what runs, and where."""

    kind: ClassVar[str] = "run"
    version: int = VERSION
    model: str | None = None
    policy: str | None = None
    dtype: str | None = None
    device: str | None = None
    torch: str | None = None
    mezzo: str | None = None
    rank: int = 0
    ranks: int = 1
    started: float = 0.0
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """The metrics of one step."""

    kind: ClassVar[str] = "step"
    loss: float | None = None
    """None if the loss is not known."""
    scale: float = 1.0
    """Loss scale after the step; 1 without a scaler."""
    skipped: bool | None = False
    """Whether the update was skipped; None if the call only accumulated gradients."""
    norm: float | None = None
    """Norm of the unscaled gradients, if the step computes it."""
    parameter: str | None = None
    """Name of the first parameter whose gradient was not finite."""
    rate: float | None = None
    """Learning rate in the first group of the first optimizer when the record was made: of steps
    that arrive together, that of the last. None if it is not known without waiting."""


@dataclass(frozen=True, kw_only=True)
class GradientsRecord(Record):
    """How many gradient values overflowed and underflowed since the last such record."""

    kind: ClassVar[str] = "gradients"
    layers: Mapping[str, Counts]
    """Counts by parameter name."""

    def to_json(self) -> dict[str, Any]:
        """Return `[overflowed, underflowed, total]` for each name, and besides them the zeros."""
        layers = {
            name: [counts.overflowed, counts.underflowed, counts.total]
            for name, counts in self.layers.items()
        }
        zeros = {name: counts.zeros for name, counts in self.layers.items()}
        return super().to_json() | {"layers": layers, "zeros": zeros}


@dataclass(frozen=True)
class TensorStats:
    """Statistics of the values of one tensor, of an even sample of it if it is large."""

    dtype: str
    count: int
    """Values of the tensor."""
    sampled: int
    """Values that the statistics are of; less than `count` in large tensors."""
    nan: int
    """NaN among the sampled values; at least 1 if there is one anywhere."""
    inf: int
    """Infinite values, likewise."""
    zero: int
    min: float | None
    """Smallest finite value sampled; None without one."""
    max: float | None
    """Largest finite value sampled."""
    rms: float | None
    """Root of the mean square of the finite values sampled."""
    headroom: float | None
    """Bits before the largest magnitude of the whole tensor overflows its dtype: 1 means that twice
    the value is still finite. 0 if there is an infinity or a NaN, None for a tensor of zeros."""
    underflow: float
    """Share of values that are not zero but below the smallest normal number of the dtype."""
    histogram: tuple[tuple[int, int], ...] = ()
    """`(exponent, count)` of the finite values that are not zero: exponent e stands for magnitudes
    from 2**e up to 2**(e+1)."""
    lost: float | None = None
    """Of updates: share of values that had a gradient and stayed as they were, in the master weight
    where there is one. Of other tensors None."""
    lost_half: float | None = None
    """Of updates: share of changed master weights whose 16-bit parameter stayed as it was."""


@dataclass(frozen=True, kw_only=True)
class TensorsRecord(Record):
    """Sampled statistics of parameters, gradients, activations or updates."""

    kind: ClassVar[str] = "tensors"
    which: str
    """`"parameters"`, `"gradients"`, `"activations"` or `"updates"`."""
    stats: Mapping[str, TensorStats]
    """Statistics by the name of the parameter or module."""

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as plain data."""
        return super().to_json() | {
            "stats": {name: vars(counts) for name, counts in self.stats.items()}
        }


@dataclass(frozen=True, kw_only=True)
class OpsRecord(Record):
    """The ops of a sampled step."""

    kind: ClassVar[str] = "ops"
    rows: tuple[Mapping[str, Any], ...]
    """The fields of an `OpRow` for each module, op and dtype."""


@dataclass(frozen=True, kw_only=True)
class EventRecord(Record):
    """An event of mezzo, such as a captured step or a collapsed loss scale."""

    kind: ClassVar[str] = "event"
    name: str
    """Class name of the event."""
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, event: Event, step: int, time: float) -> EventRecord:
        """Make the record of an event."""
        values = {field.name: getattr(event, field.name) for field in fields(event)}
        return cls(step=step, time=time, name=type(event).__name__, fields=values)


@dataclass(frozen=True, kw_only=True)
class RunEnded(Record):
    """The last line of a log that was closed."""

    kind: ClassVar[str] = "end"
    reason: str = "stopped"
    """`"stopped"`, or the exception that ended the block."""


def is_important(record: Record) -> bool:
    """Return whether a record is kept in the log at any size: skips, overflows, events, the end."""
    if isinstance(record, StepRecord):
        return bool(record.skipped)
    if isinstance(record, GradientsRecord):
        return any(layer.overflowed for layer in record.layers.values())
    return not isinstance(record, TensorsRecord | OpsRecord)
