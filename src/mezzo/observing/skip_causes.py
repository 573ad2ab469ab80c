"""Why steps were skipped, found from the records of their steps in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mezzo.observing.log_values import Line, finite, number, plain_number, step_of

_SAME_SEARCH = 10
"""Steps after a skip of the scale search in which another one belongs to it."""


@dataclass(frozen=True)
class Skip:
    """A skipped step, with what is known of its cause."""

    step: int
    rank: int
    scale: float | None
    """Loss scale of the step; None if no step before it is in the log."""
    next_scale: float | None
    """Loss scale after the step."""
    loss: float | None
    parameter: str | None
    """The first parameter with a non-finite gradient."""
    cause: str
    """Why the gradients were not finite, as far as the log shows it."""
    is_normal: bool
    """Whether skips like this one belong to the search for the loss scale."""


class SkipCauses:
    """Finds the cause of each skipped step of a rank, from its records and those before it.

    `findings` are the results of `trace_overflow` by step, where there are any.

    >>> causes = SkipCauses()
    >>> causes.add({"step": 1, "scale": 8.0, "skipped": False})
    >>> causes.add({"step": 2, "scale": 4.0, "skipped": True}).cause
    'gradients overflowed at the scale 8, which had not grown'
    """

    def __init__(self, rank: int = 0, findings: Mapping[int | None, Line] | None = None) -> None:
        self._rank, self._findings = rank, findings or {}
        self._scale: float | None = None
        self._last = 0
        self._searched = -_SAME_SEARCH - 1
        """The last skip that belongs to the search for the loss scale."""
        self._stepped = self._grew = False

    def add(self, line: Line) -> Skip | None:
        """Add the record of the next step; return it with its cause if it was skipped."""
        step, after = step_of(line), finite(line.get("scale"))
        if step is None:
            return None
        skip = self._skip(line, step, after) if line.get("skipped") is True else None
        if skip is None:
            self._stepped = True
            is_larger = self._scale is not None and after is not None and after > self._scale
            self._grew = self._grew or is_larger
        else:
            self._grew = False
        self._scale, self._last = self._scale if after is None else after, step
        return skip

    def _skip(self, line: Line, step: int, after: float | None) -> Skip:
        scale = self._scale
        if step > self._last + 1 and after is not None and scale is not None and after >= scale:
            # The step in which the scale grew is not in the log, which has every 10th, say.
            scale, self._grew = after * 2, True
        cause, is_normal = self._cause(line, step, scale)
        if is_normal:
            self._searched = step
        parameter = line.get("parameter")
        return Skip(
            step=step,
            rank=self._rank,
            scale=scale,
            next_scale=after,
            loss=number(line.get("loss")),
            parameter=None if parameter is None else str(parameter),
            cause=cause,
            is_normal=is_normal,
        )

    def _cause(self, line: Line, step: int, scale: float | None) -> tuple[str, bool]:
        finding = self._findings.get(step)
        if finding is not None and finding.get("op"):
            sentence = describe_finding(finding)
            return sentence[:1].lower() + sentence[1:], False
        loss = number(line.get("loss"))
        if loss is not None and not math.isfinite(loss):
            return f"the loss was {loss}: the forward pass overflowed, or its input was bad", False
        at = "" if scale is None else f" {plain_number(scale)}"
        if not self._stepped:
            return f"the first scale{at} was too large: the search for it goes on", True
        if self._grew:
            limit = at or " its limit"
            return f"the scale had grown to{limit}: the search for the largest one", True
        if step - self._searched <= _SAME_SEARCH:
            return f"the scale{at} was still too large: the search for the largest one", True
        return f"gradients overflowed at the scale{at}, which had not grown", False


def failed_cure(finding: Line) -> bool:
    """Return whether the batch of a finding was run with its cure, and failed with it too."""
    return finding.get("policy") is not None and finding.get("verified") is False


def describe_finding(finding: Line) -> str:
    """Return the result of `trace_overflow` as one sentence, without its full stop."""
    what = "The gradient of the op" if finding.get("direction") == "backward" else "The op"
    if finding.get("direction") in {"data", "parameters"}:
        what = "The tensor"
    module = f" in {finding['module']}" if finding.get("module") else ""
    line = f" ({finding['line']})" if finding.get("line") else ""
    return f"{what} {finding.get('op')}{module}{line} {finding.get('reason') or 'failed'}"
