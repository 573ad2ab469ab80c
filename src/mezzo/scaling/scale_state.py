"""The loss scale as a value: the rule it follows, its state, the next state, and the saved form."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from typing import Any

import torch

from mezzo._errors import PolicyError, ScalerError
from mezzo.policy.types import ParsedEnum

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
    backoff_interval: int = 1
    """Bad steps before the scale backs off; 0 never backs off."""
    consecutive_backoff: bool = True
    """Whether a good step forgets the bad ones before it (Paddle). If not (DeepSpeed), they
    count until the scale grows, and every one beyond backs off."""
    min_scale: float = 2.0**-24
    """The scale never falls below."""
    max_scale: float = LARGEST
    """The scale never rises above."""
    dynamic: bool = True
    """Whether the scale changes at all; a static one still skips bad steps."""
    warmup_steps: int = 0
    """Steps at the start in which the scale stands still."""

    def __post_init__(self) -> None:
        _refuse(
            1.0 < self.growth_factor < math.inf,
            "growth_factor",
            self.growth_factor,
            "a finite number greater than 1",
        )
        _refuse(self.backoff_factor < 1.0, "backoff_factor", self.backoff_factor, "less than 1")
        for name in ("growth_interval", "backoff_interval", "warmup_steps"):
            value = getattr(self, name)
            _refuse(
                isinstance(value, int) and value >= 0,
                name,
                value,
                "a whole number of steps, 0 or more",
            )
        _refuse(
            SMALLEST <= self.min_scale < math.inf,
            "min_scale",
            self.min_scale,
            f"a finite number of at least {SMALLEST:g}",
        )
        _refuse(
            self.min_scale <= self.max_scale <= LARGEST,
            "max_scale",
            self.max_scale,
            "at least min_scale and at most the largest float32",
        )

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
    growth_tracker: int = 0
    """Good steps since the scale last changed or a step was bad: torch's growth tracker."""
    backoff_tracker: int = 0
    """Bad steps that count towards the next back-off."""
    good_steps: int = 0
    """Good steps in all."""
    skipped_steps: int = 0
    """Skipped steps in all."""
    consecutive_skips: int = 0
    """Skipped steps since the last good one."""

    def __post_init__(self) -> None:
        # Asked first, for a state is made on every update.
        if not 0.0 < self.scale < math.inf:
            _refuse(False, "scale", self.scale, "a positive finite number")


def next_state(state: ScaleState, rule: ScaleRule, *, found_nonfinite: bool) -> ScaleState:
    """The state after one step whose gradients were finite or not.

    >>> next_state(ScaleState(8.0, growth_tracker=1999), ScaleRule(), found_nonfinite=False).scale
    16.0
    """
    good, skipped = (
        (state.good_steps, state.skipped_steps + 1)
        if found_nonfinite
        else (state.good_steps + 1, state.skipped_steps)
    )
    in_a_row = state.consecutive_skips + 1 if found_nonfinite else 0
    if not rule.dynamic or state.good_steps + state.skipped_steps < rule.warmup_steps:
        changed = (state.scale, state.growth_tracker, state.backoff_tracker)
    else:
        changed = _after_nonfinite(state, rule) if found_nonfinite else _after_finite(state, rule)
    # Built once and by position: `replace` twice took a third of an update.
    return ScaleState(*changed, good, skipped, in_a_row)


def _after_nonfinite(state: ScaleState, rule: ScaleRule) -> tuple[float, int, int]:
    bad = state.backoff_tracker + 1
    if rule.backoff_interval == 0 or bad < rule.backoff_interval:
        return state.scale, 0, bad
    return (
        rule.clamp(state.scale * rule.backoff_factor),
        0,
        0 if rule.consecutive_backoff else rule.backoff_interval - 1,
    )


def _after_finite(state: ScaleState, rule: ScaleRule) -> tuple[float, int, int]:
    good, bad = state.growth_tracker + 1, 0 if rule.consecutive_backoff else state.backoff_tracker
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


_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_REMEDY = "Pass what scaler.state_dict() returned."
_RULE, _STATES = "mezzo_rule", "mezzo_states"


def scaler_to_dict(states: list[ScaleState], rule: ScaleRule) -> dict[str, Any]:
    """torch's five entries, and under names that torch ignores everything else."""
    return {
        "scale": states[0].scale,
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": states[0].growth_tracker,
        _RULE: asdict(rule),
        _STATES: [asdict(state) for state in states],
    }


def scaler_from_dict(
    entries: Mapping[str, Any], rule: ScaleRule, losses: int
) -> tuple[list[ScaleState], ScaleRule]:
    """Read what `to_dict` or torch's scaler wrote, whole or not at all.

    torch's five entries are public, and win over mezzo's own where they differ: somebody has edited
    them. The scale and the growth tracker are those of the first loss.
    """
    if not isinstance(entries, Mapping):
        raise ScalerError(
            f"This is not the state of a scaler: {entries!r:.80} is no dictionary. {_REMEDY}"
        )
    if not entries:
        raise ScalerError(
            "The state is empty: it was saved from a scaler that was not enabled. Leave it out, or"
            " save it from an enabled one."
        )
    missing = [name for name in _TORCH if name not in entries]
    if missing:
        raise ScalerError(
            f"This is not the state of a scaler: {', '.join(missing)} missing. {_REMEDY}"
        )
    own = ScaleRule(**_known(ScaleRule, entries[_RULE])) if _RULE in entries else rule
    read = replace(
        own,
        **_known(
            ScaleRule,
            {
                name: entries[name]
                for name in ("growth_factor", "backoff_factor", "growth_interval")
            },
        ),
    )
    public = {"scale": entries["scale"], "growth_tracker": entries["_growth_tracker"]}
    saved = entries.get(_STATES) or [public] * losses
    if not isinstance(saved, list) or not all(isinstance(one, Mapping) for one in saved):
        raise ScalerError(
            f"The states of the losses are {saved!r:.80}, not a list of dictionaries. {_REMEDY}"
        )
    if len(saved) != losses:
        raise ScalerError(
            f"The state has {len(saved)} losses, this scaler {losses}. Make it with"
            f" GradScaler(num_losses={len(saved)})."
        )
    return [_state(state, read) for state in ({**saved[0], **public}, *saved[1:])], read


def _state(entries: Mapping[str, Any], rule: ScaleRule) -> ScaleState:
    known = _known(ScaleState, entries)
    scale = float(known["scale"]) if "scale" in known else math.nan
    if not is_scale(scale):
        raise ScalerError(
            f"The saved scale is {scale!r}, which no gradient survives. Start again from a positive"
            " finite scale, such as 65536.0."
        )
    return ScaleState(**{**known, "scale": rule.clamp(scale)})


def _known(kind: type[ScaleRule | ScaleState], entries: Any) -> dict[str, Any]:
    """What this version knows of, each a number or a flag as it must be: a later one may have saved more."""
    if not isinstance(entries, Mapping):
        raise ScalerError(
            f"The saved {kind.__name__} is {entries!r:.80}, not a dictionary. {_REMEDY}"
        )
    return {
        field.name: _value(field, entries[field.name])
        for field in fields(kind)
        if field.name in entries
    }


def _value(field: Field[Any], value: Any) -> Any:
    if isinstance(field.default, bool):
        wanted, fits = "True or False", isinstance(value, bool)
    elif isinstance(field.default, int):
        wanted, fits = (
            "a whole number of at least 0",
            _is_number(value) and value == value // 1 and value >= 0,
        )
    else:
        wanted, fits = "a number", _is_number(value)
    if not fits:
        raise ScalerError(
            f"The saved {field.name} is {value!r:.80}, and must be {wanted}. {_REMEDY}"
        )
    made: Any = type(field.default)
    return made(value)


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


class OnCollapse(ParsedEnum):
    """What to do when the scale is at its floor or too many steps in a row were skipped."""

    WARN = "warn"
    RAISE = "raise"


class OptimizerStage(ParsedEnum):
    """Where an optimizer stands between two updates."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"
