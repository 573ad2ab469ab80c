"""Sample the ops of a step: a collector of op statistics for an observed run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mezzo.observing.op_stats import OpStats
from mezzo.observing.op_stats_table import OpRow, format_table
from mezzo.observing.records import OpsRecord, Record


@dataclass(frozen=True)
class SampledOps:
    """Op statistics of one step: `rows`, or print it."""

    rows: tuple[OpRow, ...] = ()

    def table(self, depth: int = 0) -> str:
        """Return the table, summed over modules below `depth` levels of the model."""
        return format_table(self.rows, depth) if self.rows else "No step was sampled yet."

    def __str__(self) -> str:
        return self.table()


class OpSampler:
    """Counts the ops of a sampled step."""

    def __init__(self, models: Any) -> None:
        self._stats = OpStats(models)
        self._step = 0
        self._is_new = False
        self.latest = SampledOps()
        """The ops of the last sampled step."""

    def start(self, step: int) -> None:
        """Begin to count the ops of a step."""
        self._step = step
        self._stats.clear()
        self._stats.start()

    def stop(self) -> None:
        """Stop counting, and keep the counts."""
        self._stats.stop()
        self.latest, self._is_new = SampledOps(self._stats.rows), True

    def take(self, time: float) -> list[Record]:
        """Return the record of the last sampled step, once."""
        if not self._is_new:
            return []
        self._is_new = False
        rows = tuple(asdict(row) for row in self.latest.rows)
        return [OpsRecord(step=self._step, time=time, rows=rows)]
