"""The scale as a value: how it grows, backs off and never leaves the finite positive numbers. No tensors here.

Arithmetic is float32, as on the device: a scale that a trace of another system reaches is reached bit for bit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from mezzo._errors import PolicyError

LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
"""The largest float32."""
SMALLEST = 2.0**-126
"""The smallest float32 whose reciprocal is finite and exact to the last bit."""


@dataclass(frozen=True)
class ScaleRule:
    """How a scale reacts to good and bad steps.

    >>> ScaleRule(growth_interval=2).after(ScaleState(8.0), found_nonfinite=True).scale
    4.0
    """

    growth_factor: float = 2.0
    """What the scale is multiplied by when it grows."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by when it backs off."""
    growth_interval: int = 2000
    """Good steps in a row before the scale grows; 0 never grows."""
    backoff_every: int = 1
    """Bad steps before the scale backs off; 0 never backs off."""
    consecutive: bool = True
    """Whether a good step forgets the bad ones before it (Paddle). If not (DeepSpeed), they count until the scale grows, and every one beyond backs off."""
    min_scale: float = 2.0**-24
    """The scale never falls below."""
    max_scale: float = LARGEST
    """The scale never rises above."""
    dynamic: bool = True
    """Whether the scale changes at all; a static one still skips bad steps."""
    warmup: int = 0
    """Steps at the start in which the scale stands still."""

    def __post_init__(self) -> None:
        _refuse(1.0 < self.growth_factor < math.inf, "growth_factor", self.growth_factor, "a finite number greater than 1")
        _refuse(self.backoff_factor < 1.0, "backoff_factor", self.backoff_factor, "less than 1")
        for name in ("growth_interval", "backoff_every", "warmup"):
            value = getattr(self, name)
            _refuse(isinstance(value, int) and value >= 0, name, value, "a whole number of steps, 0 or more")
        _refuse(SMALLEST <= self.min_scale < math.inf, "min_scale", self.min_scale, f"a finite number of at least {SMALLEST:g}")
        _refuse(self.min_scale <= self.max_scale <= LARGEST, "max_scale", self.max_scale, "at least min_scale and at most the largest float32")

    def after(self, state: ScaleState, *, found_nonfinite: bool) -> ScaleState:
        """The state after one step: `next_state` in the order that a sentence has."""
        return next_state(state, self, found_nonfinite=found_nonfinite)

    def clamp(self, scale: float) -> float:
        """The nearest float32 scale within the floor and the ceiling."""
        return float32(min(max(scale, self.min_scale), self.max_scale))

    @property
    def floor(self) -> float:
        """The floor as a float32 scale shows it."""
        return float32(self.min_scale)


@dataclass(frozen=True)
class ScaleState:
    """A scale and what it has seen."""

    scale: float = 2.0**16
    """What losses are multiplied by."""
    good_in_a_row: int = 0
    """Good steps since the scale last changed or a step was bad: torch's growth tracker."""
    bad_counted: int = 0
    """Bad steps that count towards the next back-off."""
    good: int = 0
    """Good steps in all."""
    skipped: int = 0
    """Skipped steps in all."""
    skipped_in_a_row: int = 0
    """Skipped steps since the last good one."""

    def __post_init__(self) -> None:
        # Asked first, for a state is made on every update.
        if not 0.0 < self.scale < math.inf:
            _refuse(False, "scale", self.scale, "a positive finite number")


def next_state(state: ScaleState, rule: ScaleRule, *, found_nonfinite: bool) -> ScaleState:
    """The state after one step whose gradients were finite or not.

    >>> next_state(ScaleState(8.0, good_in_a_row=1999), ScaleRule(), found_nonfinite=False).scale
    16.0
    """
    good, skipped = (state.good, state.skipped + 1) if found_nonfinite else (state.good + 1, state.skipped)
    in_a_row = state.skipped_in_a_row + 1 if found_nonfinite else 0
    if not rule.dynamic or state.good + state.skipped < rule.warmup:
        changed = (state.scale, state.good_in_a_row, state.bad_counted)
    else:
        changed = _after_bad(state, rule) if found_nonfinite else _after_good(state, rule)
    # Built once and by position: `replace` twice took a third of an update.
    return ScaleState(*changed, good, skipped, in_a_row)


def _after_bad(state: ScaleState, rule: ScaleRule) -> tuple[float, int, int]:
    bad = state.bad_counted + 1
    if rule.backoff_every == 0 or bad < rule.backoff_every:
        return state.scale, 0, bad
    return rule.clamp(state.scale * rule.backoff_factor), 0, 0 if rule.consecutive else rule.backoff_every - 1


def _after_good(state: ScaleState, rule: ScaleRule) -> tuple[float, int, int]:
    good, bad = state.good_in_a_row + 1, 0 if rule.consecutive else state.bad_counted
    if rule.growth_interval == 0 or good < rule.growth_interval:
        return state.scale, good, bad
    grown = float32(state.scale * rule.growth_factor)
    # Growth past the largest float32 is dropped, as torch's kernel drops it.
    return rule.clamp(grown if math.isfinite(grown) else state.scale), 0, 0


def float32(value: float) -> float:
    """Round to the nearest float32; what is too large becomes infinite.

    >>> float32(0.1) == 0.1, float32(1e300)
    (False, inf)
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def is_scale(value: float) -> bool:
    """Whether a number can be a scale."""
    return math.isfinite(value) and value > 0.0


def _refuse(allowed: bool, name: str, value: object, wanted: str) -> None:  # noqa: FBT001
    if not allowed:
        raise PolicyError(f"{name}={value!r}: it must be {wanted}.")
