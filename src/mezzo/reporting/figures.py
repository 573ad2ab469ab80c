"""The key figures of a run: dtype, device, steps, skips, loss scale, loss and time."""

from __future__ import annotations

from dataclasses import dataclass

from mezzo.observing.log_values import finite, plain_number
from mezzo.reporting.run_data import RunData


@dataclass(frozen=True)
class KeyFigure:
    """A named number, or a fact, of a run."""

    name: str
    value: str


def key_figures(run: RunData) -> list[KeyFigure]:
    """Return the figures that the log has."""
    steps = run.ranks[0].of("step")
    losses = [loss for line in steps if (loss := finite(line.get("loss"))) is not None]
    scales = [scale for line in steps if (scale := finite(line.get("scale"))) is not None]
    rate = run.steps / run.seconds if run.seconds else None
    values = {
        "dtype": run.dtype,
        "device": run.header.get("device"),
        "ranks": str(run.world_size) if run.world_size > 1 else None,
        "steps": f"{run.steps:,}",
        "skipped": f"{len({skip.step for skip in run.skips}):,}",
        "loss scale": plain_number(scales[-1]) if scales and scales[-1] != 1 else None,
        "loss": f"{losses[-1]:.4g}" if losses else None,
        "time": _duration(run.seconds),
        "steps/s": f"{rate:.3g}" if rate and run.steps else None,
    }
    return [KeyFigure(name, str(value)) for name, value in values.items() if value]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
