"""Keep the rows of the last steps of a run as they arrive, and make records of them on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import isnan
from typing import Any

import torch

from mezzo.observing.records import StepRecord
from mezzo.step.step_history import NO_UPDATE, HistoryIndex

KEPT = 10_000
"""Steps, skips and events that a run keeps in memory; the oldest are dropped."""
_NUMBER, _SKIPPED, _SCALE = (
    HistoryIndex.NUMBER.value,
    HistoryIndex.SKIPPED.value,
    HistoryIndex.SCALE.value,
)


class KeptSteps:
    """The last steps of a run, as rows of the history.

    A few ops handle all rows that arrive together, and records are made when they are read: small
    steps take less time than a few lines of Python for each of them.

    >>> steps = KeptSteps()
    >>> row = [1.0, 0.5, 1.0, 8.0, float("nan"), 3.0, 1.0]
    >>> steps.add(torch.tensor([row]), 0.25, lambda first: "weight" if first else None)
    >>> steps.records() == list(steps.skips)
    True
    >>> steps.records()[0].loss, steps.records()[0].parameter
    (0.5, 'weight')
    """

    def __init__(self) -> None:
        self.scale = 1.0
        """Loss scale after the last step."""
        self.skipped = 0
        """Steps that were skipped so far."""
        self.skips: deque[StepRecord] = deque(maxlen=KEPT)
        self._blocks: deque[tuple[torch.Tensor, float, float | None]] = deque()
        """Rows that arrived together, when, and the learning rate then."""
        self._count = 0

    def add(
        self,
        rows: torch.Tensor,
        time: float,
        name_of: Callable[[float], str | None],
        rate: float | None = None,
    ) -> None:
        """Keep rows; complete their scales. `name_of` names the first bad parameter of a skip."""
        self.scale = _fill_scales(rows[:, _SCALE], self.scale)
        self._blocks.append((rows, time, rate))
        self._count += len(rows)
        while self._count - len(self._blocks[0][0]) >= KEPT:
            self._count -= len(self._blocks.popleft()[0])
        skipped = rows[rows[:, _SKIPPED] > 0]
        if len(skipped):
            self.skipped += len(skipped)
            self.skips.extend(
                StepRecord(**step_fields(row, time, name_of(row[HistoryIndex.FIRST]), rate))
                for row in skipped.tolist()
            )

    def records(self) -> list[StepRecord]:
        """Return the records of the last steps."""
        names = self._bad_parameters()
        records = [
            StepRecord(**step_fields(row, time, names.get(int(row[_NUMBER])), rate))
            for rows, time, rate in self._blocks
            for row in rows.tolist()
        ]
        return records[-KEPT:]

    def last(self) -> StepRecord | None:
        """Return the record of the last step; None before the first."""
        if not self._blocks:
            return None
        rows, time, rate = self._blocks[-1]
        return StepRecord(**step_fields(rows[-1].tolist(), time, None, rate))

    def logged(
        self, rows: torch.Tensor, time: float, interval: int, rate: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the fields of the records of skipped steps, and of every n-th one."""
        if interval > 1:
            rows = rows[(rows[:, _NUMBER] % interval == 0) | (rows[:, _SKIPPED] > 0)]
        names = self._bad_parameters() if self.skips else {}
        return [step_fields(row, time, names.get(int(row[_NUMBER])), rate) for row in rows.tolist()]

    def _bad_parameters(self) -> dict[int | None, str | None]:
        return {skip.step: skip.parameter for skip in self.skips}


def step_fields(
    row: list[float], time: float, parameter: str | None, rate: float | None = None
) -> dict[str, Any]:
    """Return the fields of a `StepRecord`, from a row of the history."""
    number, loss, skipped, scale, norm, _, has_loss = row
    return {
        "step": int(number),
        "time": time,
        "loss": loss if has_loss else None,
        "scale": scale,
        "skipped": None if skipped == NO_UPDATE else bool(skipped),
        "norm": None if isnan(norm) else norm,
        "parameter": parameter,
        "rate": rate,
    }


def _fill_scales(scales: torch.Tensor, before: float) -> float:
    """Replace each NaN, which means no change, by the scale before it; return the last scale.

    >>> scales = torch.tensor([torch.nan, 8.0, torch.nan])
    >>> _fill_scales(scales, 2.0), scales.tolist()
    (8.0, [2.0, 8.0, 8.0])
    """
    is_unknown = scales.isnan()
    if is_unknown.any():
        places = torch.arange(1, len(scales) + 1).masked_fill_(is_unknown, 0).cummax(0).values
        scales.copy_(torch.cat([scales.new_full((1,), before), scales])[places])
    return float(scales[-1])
