"""Who notices that a scale collapses: at most a few steps late, from copies that the device makes on its own time."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass

from mezzo import _events
from mezzo._errors import PolicyError, ScalerError
from mezzo.scaling.copies import Copy
from mezzo.scaling.culprit import Culprit
from mezzo.scaling.device import DeviceScale, HostScale, Scale
from mezzo.scaling.state import ScaleRule
from mezzo.scaling.words import OnCollapse

EVERY = 8
"""So many updates apart a device is looked at: a copy costs 100 µs of the host's time beside an H200, a whole small step 1500."""
_IN_FLIGHT = 8
"""More copies are not started while so many are under way."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What a copy saw after an update."""

    step: int
    """How many steps were counted then."""
    scale: float
    """The scale."""
    skipped_in_a_row: int
    """How many steps in a row were skipped."""
    rule: ScaleRule
    """The rule that held."""
    culprit: Culprit
    """Who can name the first bad parameter of the step."""

    @property
    def floored(self) -> bool:
        """Whether a bad step found the scale at its floor."""
        return self.rule.dynamic and self.skipped_in_a_row > 0 and self.scale <= self.rule.floor


class Watcher:
    """Looks at a scale after every update, and speaks up once an episode when it collapses."""

    def __init__(self, patience: int = 50, on_collapse: OnCollapse = OnCollapse.WARN) -> None:
        if patience < 1:
            raise PolicyError(f"patience={patience}: it must be a number of skipped steps, 1 or more.")
        self._patience = patience
        self._on_collapse = on_collapse
        self._flying: deque[tuple[int, Copy, ScaleRule, Culprit]] = deque()
        self._pending: tuple[Glance, list[Copy]] | None = None
        self._spoken = False

    def look(self, scale: Scale, rule: ScaleRule, culprit: Culprit) -> None:
        """Note the state after an update, and judge what has arrived."""
        if isinstance(scale, HostScale):
            self._look_near(scale, rule, culprit)
        elif isinstance(scale, DeviceScale):
            if scale.steps % min(EVERY, self._patience) == 0 and len(self._flying) < _IN_FLIGHT:
                self._flying.append((scale.steps, Copy(scale.shown), rule, culprit))
            if self._flying or self._pending is not None:
                self._judge_what_arrived()

    def hear(self, glance: Glance) -> None:
        """Judge what somebody else has copied."""
        if glance.skipped_in_a_row or self._spoken:
            self._judge(glance)
            self._speak()

    def _look_near(self, scale: HostScale, rule: ScaleRule, culprit: Culprit) -> None:
        if scale.troubled or self._spoken:
            state = scale.latest
            self._judge(Glance(state.good + state.skipped, state.scale, state.skipped_in_a_row, rule, culprit))
            self._speak()

    def _judge_what_arrived(self) -> None:
        self._speak()
        while self._flying and self._flying[0][1].arrived():
            step, copy, rule, culprit = self._flying.popleft()
            scale, _, in_a_row, _ = copy.values()
            self._judge(Glance(step, scale, int(in_a_row), rule, culprit))

    def _judge(self, glance: Glance) -> None:
        if not glance.floored and glance.skipped_in_a_row < self._patience:
            # The episode lasts until a step is good again.
            self._spoken = self._spoken and glance.skipped_in_a_row > 0
        elif not self._spoken:
            self._spoken = True
            self._pending = (glance, glance.culprit.fetch())

    def _speak(self) -> None:
        if self._pending is None or not all(copy.arrived() for copy in self._pending[1]):
            return
        (glance, fetched), self._pending = self._pending, None
        message = self._message(glance, glance.culprit.told(fetched))
        if _events.listening():
            _events.emit(_events.ScaleCollapsed(glance.scale, glance.skipped_in_a_row, message))
        if self._on_collapse is OnCollapse.RAISE:
            raise ScalerError(f"{message} It was stopped here because of on_collapse='raise'.")
        # Seen from the line that called update().
        warnings.warn(f"{message} Training goes on, skipping.", UserWarning, stacklevel=6)

    def _message(self, glance: Glance, name: str | None) -> str:
        what = f"The loss scale is at its floor of {glance.scale:g}" if glance.floored else f"{glance.skipped_in_a_row} steps in a row were skipped"
        where = f", first in the gradient of {name!r}" if name else ""
        return (
            f"{what} (step {glance.step}): gradients keep coming out not finite{where}. The cause is rarely the scale: look for a loss that is not finite, "
            "a division or logarithm near zero, or a learning rate that is too high; bfloat16 needs no scale."
        )
