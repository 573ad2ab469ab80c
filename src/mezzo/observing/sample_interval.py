"""Steps between samples: as the user sets them, or so that samples take 1 % of the time."""

from __future__ import annotations

from math import ceil

DEFAULT_INTERVAL = 100
"""Steps between samples unless the user passes another number, or more if steps are short."""
_SHARE = 0.01
"""Share of the time of a run that its samples may take."""


class SampleInterval:
    """Steps between samples: as many as passed, or for None 100 and more where steps are short.

    Before steps between samples have been timed there is no bound, so that the first two samples of
    a run may take more.

    >>> interval = SampleInterval(None)
    >>> interval.begin(1, now=0.0), interval.end(1, now=0.5), interval.choose()
    (None, None, 100)
    >>> interval.begin(101, now=0.599)  # a step took 1 ms
    >>> interval.end(101, now=0.605), interval.choose()  # and the sample 5 ms more
    (None, 500)
    """

    def __init__(self, steps: int | None) -> None:
        self._fixed = steps
        self._last: tuple[int, float] | None = None
        """The last sampled step, and when it ended."""
        self._began = 0.0
        self._step_seconds = 0.0
        """Mean of the steps between the last samples; 0 if there were none."""
        self._spent = 0.0
        """Seconds that samples have taken since the last choice, besides those of their steps."""

    @property
    def is_timed(self) -> bool:
        """Whether the interval depends on the time of steps, which must be complete at `begin`."""
        return self._fixed is None

    def begin(self, step: int, now: float) -> None:
        """Begin a sampled step."""
        self._began = now
        if self._last is not None and step - 1 > self._last[0]:
            number, then = self._last
            self._step_seconds = (now - then) / (step - 1 - number)

    def end(self, step: int, now: float) -> None:
        """End a sampled step."""
        self._last = (step, now)
        self.spend(max(0.0, now - self._began - self._step_seconds))

    def spend(self, seconds: float) -> None:
        """Count the time that reading samples took."""
        self._spent += seconds

    def choose(self) -> int:
        """Return the steps to the next sample. Called at each sample, since the speed varies."""
        spent, self._spent = self._spent, 0.0
        if self._fixed is not None:
            return self._fixed
        if not self._step_seconds:
            return DEFAULT_INTERVAL
        return max(DEFAULT_INTERVAL, ceil(round(spent / (_SHARE * self._step_seconds), 6)))
