"""The result of `mezzo compare`: a row of numbers for each mode, as a value and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from mezzo.comparing.workload import Documented

BASELINE = "float32"
"""The mode that the others are compared with, unless a comparison names another."""


@dataclass(frozen=True)
class ModeResult:
    """What was measured in one mode. `None`: not measured, or not applicable."""

    mode: str
    """`float32`, `TF32`, `torch.amp`, `Apex O1`, `Apex O2`, `O1`, `O2`, `O2 captured`,
    `converted`."""
    dtype: str | None = None
    """The 16-bit dtype, if the mode has one."""
    milliseconds: float | None = None
    """Median of a training step, or of a forward pass for `converted`."""
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    """Peak of allocated memory on a GPU from the second step on; on a CPU parameters, gradients and
    optimizer states."""
    saved_bytes: int | None = None
    """Bytes of the tensors that a step keeps for backward."""
    casts: int | None = None
    """Casts of one step."""
    loss: float | None = None
    """Mean loss of the last tenth of the steps."""
    skipped: int | None = None
    """Steps that were skipped because of non-finite gradients."""
    accuracy: float | None = None
    loss_curve: tuple[float, ...] = ()
    """Mean loss of each epoch, or of each tenth of the steps."""
    accuracy_curve: tuple[float, ...] = ()
    """Accuracy after each epoch."""
    note: str | None = None
    """Why a mode was not run, or what to know about its numbers."""


@dataclass(frozen=True)
class Comparison:
    """What was measured in all modes of one workload, on one machine."""

    workload: str
    title: str
    preset: str
    data: str
    machine: str
    """Name of the device: `NVIDIA H200`."""
    torch: str
    mezzo: str
    steps: int
    rounds: int
    """Rounds of timing, each of which ran every mode."""
    modes: tuple[ModeResult, ...]
    documented: tuple[Documented, ...] = ()
    complete: bool = True
    """False after Ctrl-C: some modes have fewer rounds, or none."""
    emulated: str | None = None
    """Why the device does not compute the 16-bit dtype natively; None if it does."""
    baseline: str = BASELINE
    """The mode that speedups are over."""

    def mode(self, name: str) -> ModeResult | None:
        """Return the result of a mode, or None if it was not part of the run."""
        return next((mode for mode in self.modes if mode.mode == name), None)

    def speedup(self, name: str) -> float | None:
        """Return how many times as fast as the baseline a mode is, or None without both times.

        >>> result = Comparison("mlp", "MLP", "small", "synthetic", "CPU", "2.13", "0.1.0", 10, 5, (
        ...     ModeResult("float32", milliseconds=6.0), ModeResult("O1", milliseconds=3.0)))
        >>> result.speedup("O1")
        2.0
        """
        base, mode = self.mode(self.baseline), self.mode(name)
        if base is None or mode is None or not base.milliseconds or not mode.milliseconds:
            return None
        return base.milliseconds / mode.milliseconds

    def to_json(self) -> dict[str, Any]:
        """Return the result as what `json.dumps` takes."""
        return {"benchmark": "compare", **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Comparison:
        """Return the result that `to_json` gave.

        >>> first = Comparison("mlp", "MLP", "small", "synthetic", "CPU", "2.13", "0.1.0", 10, 5, (
        ...     ModeResult("float32", loss_curve=(2.0, 1.0)),))
        >>> Comparison.from_json(first.to_json()) == first
        True
        """
        fields = {name: value for name, value in data.items() if name != "benchmark"}
        modes = tuple(_mode(row) for row in fields.pop("modes"))
        documented = tuple(Documented(**row) for row in fields.pop("documented"))
        return cls(**fields, modes=modes, documented=documented)


def _mode(row: dict[str, Any]) -> ModeResult:
    result = ModeResult(**row)
    return replace(
        result,
        loss=_number(result.loss),
        accuracy=_number(result.accuracy),
        loss_curve=tuple(map(_number, result.loss_curve)),
        accuracy_curve=tuple(map(_number, result.accuracy_curve)),
    )


def _number(value: Any) -> Any:
    """Return a number; strict JSON has infinities and NaN as texts."""
    return float(value) if value in {"nan", "inf", "-inf"} else value
