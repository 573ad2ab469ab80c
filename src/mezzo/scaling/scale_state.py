"""The loss scale as a value: its rule, its state, the next state, and the state dict."""

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
    """How a loss scale reacts to successful and skipped steps.

    A step is skipped if a gradient is not finite. The defaults are those of torch's GradScaler,
    with a floor. `GradScaler` takes the fields as keyword arguments.

    >>> ScaleRule(growth_interval=2).after(ScaleState(8.0), found_nonfinite=True).scale
    4.0
    """

    growth_factor: float = 2.0
    """Factor by which the scale grows; greater than 1."""
    backoff_factor: float = 0.5
    """Factor by which the scale backs off; less than 1."""
    growth_interval: int = 2000
    """Successful steps in a row before the scale grows; 0: it never grows."""
    backoff_interval: int = 1
    """Skipped steps before the scale backs off; 0: it never backs off."""
    consecutive_backoff: bool = True
    """Whether only skipped steps in a row count for `backoff_interval`, as in Paddle. If False,
    as in DeepSpeed, they are counted until the scale grows, and each further one backs off."""
    min_scale: float = 2.0**-24
    """The floor: the scale never backs off below it."""
    max_scale: float = LARGEST
    """The ceiling: the scale never grows above it."""
    dynamic: bool = True
    """Whether the scale changes. With a static scale, non-finite steps are still skipped."""
    warmup_steps: int = 0
    """Number of first steps in which the scale does not change."""

    def __post_init__(self) -> None:
        growth, backoff = self.growth_factor, self.backoff_factor
        growth_ok = 1.0 < growth < math.inf
        _check("growth_factor", growth, "a finite number greater than 1", growth_ok)
        _check("backoff_factor", backoff, "less than 1", backoff < 1.0)
        for name in ("growth_interval", "backoff_interval", "warmup_steps"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and value >= 0
            _check(name, value, "a whole number of steps, 0 or more", is_count)
        low, high = self.min_scale, self.max_scale
        low_ok, high_ok = SMALLEST <= low < math.inf, low <= high <= LARGEST
        _check("min_scale", low, f"a finite number of at least {SMALLEST:g}", low_ok)
        _check("max_scale", high, "at least min_scale and at most the largest float32", high_ok)

    def after(self, state: ScaleState, *, found_nonfinite: bool) -> ScaleState:
        """Return the state after one step, as `next_state` does."""
        return next_state(state, self, found_nonfinite=found_nonfinite)

    def clamp(self, scale: float) -> float:
        """Return the nearest float32 between `min_scale` and `max_scale`."""
        return float32(min(max(scale, self.min_scale), self.max_scale))

    @property
    def floor(self) -> float:
        """`min_scale`, rounded to float32 as the scale is."""
        return float32(self.min_scale)


@dataclass(frozen=True)
class ScaleState:
    """A loss scale and its counters; `GradScaler.state()` returns it."""

    scale: float = 2.0**16
    """The loss scale: losses are multiplied by it, and gradients divided."""
    growth_tracker: int = 0
    """Successful steps since the scale last changed or a step was skipped, as in torch."""
    backoff_tracker: int = 0
    """Skipped steps that count for the next back-off."""
    good_steps: int = 0
    """Number of successful steps."""
    skipped_steps: int = 0
    """Number of skipped steps."""
    consecutive_skips: int = 0
    """Skipped steps since the last successful one."""

    def __post_init__(self) -> None:
        # Compared before the call: a state is made at every update.
        if not 0.0 < self.scale < math.inf:
            _check("scale", self.scale, "a positive finite number", False)


def next_state(state: ScaleState, rule: ScaleRule, *, found_nonfinite: bool) -> ScaleState:
    """Return the state after one step, skipped if a gradient was not finite.

    >>> next_state(ScaleState(8.0, growth_tracker=1999), ScaleRule(), found_nonfinite=False).scale
    16.0
    """
    good, skipped = (
        (state.good_steps, state.skipped_steps + 1)
        if found_nonfinite
        else (state.good_steps + 1, state.skipped_steps)
    )
    consecutive_skips = state.consecutive_skips + 1 if found_nonfinite else 0
    if not rule.dynamic or state.good_steps + state.skipped_steps < rule.warmup_steps:
        changed = (state.scale, state.growth_tracker, state.backoff_tracker)
    else:
        changed = _after_nonfinite(state, rule) if found_nonfinite else _after_finite(state, rule)
    # Built once and by position: `replace` twice took a third of an update.
    return ScaleState(*changed, good, skipped, consecutive_skips)


def _after_nonfinite(state: ScaleState, rule: ScaleRule) -> tuple[float, int, int]:
    """Return scale, growth tracker and backoff tracker after a skipped step."""
    skips = state.backoff_tracker + 1
    if rule.backoff_interval == 0 or skips < rule.backoff_interval:
        return state.scale, 0, skips
    return (
        rule.clamp(state.scale * rule.backoff_factor),
        0,
        0 if rule.consecutive_backoff else rule.backoff_interval - 1,
    )


def _after_finite(state: ScaleState, rule: ScaleRule) -> tuple[float, int, int]:
    """Return scale, growth tracker and backoff tracker after a successful step."""
    good = state.growth_tracker + 1
    skips = 0 if rule.consecutive_backoff else state.backoff_tracker
    if rule.growth_interval == 0 or good < rule.growth_interval:
        return state.scale, good, skips
    grown = float32(state.scale * rule.growth_factor)
    # No growth past the largest float32, as in torch's kernel.
    return rule.clamp(grown if math.isfinite(grown) else state.scale), 0, 0


def float32(value: float) -> float:
    """Round to the nearest float32; a number that is too large becomes infinite.

    >>> float32(0.1) == 0.1, float32(1e300)
    (False, inf)
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def is_scale(value: float) -> bool:
    """Return whether a number can be a loss scale: positive and finite."""
    return math.isfinite(value) and value > 0.0


def _check(name: str, value: object, allowed: str, ok: bool) -> None:  # noqa: FBT001
    if not ok:
        raise PolicyError(f"{name}={value!r}: it must be {allowed}.")


class OnCollapse(ParsedEnum):
    """What to do when the scale is at its floor or too many steps in a row were skipped."""

    WARN = "warn"
    RAISE = "raise"


class OptimizerStage(ParsedEnum):
    """What was done with an optimizer since the last update of the scale."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


# -- state dict ------------------------------------------------------------------------------------

_TORCH_RULE = ("growth_factor", "backoff_factor", "growth_interval")
_TORCH_ENTRIES = ("scale", *_TORCH_RULE, "_growth_tracker")
_RULE, _STATES = "mezzo_rule", "mezzo_states"
_REMEDY = "Pass what scaler.state_dict() returned."


def scaler_to_dict(states: list[ScaleState], rule: ScaleRule) -> dict[str, Any]:
    """Return torch's five entries, and everything else under keys that torch ignores."""
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
    """Read a state dict of mezzo's or torch's scaler; raise `ScalerError` if it is not one.

    Where torch's five entries differ from mezzo's, torch's count: they are public, and a user may
    have edited them. The scale and the growth tracker are those of the first loss.
    """
    _check_entries(entries)
    base = ScaleRule(**_read_fields(ScaleRule, entries[_RULE])) if _RULE in entries else rule
    torchs = {name: entries[name] for name in _TORCH_RULE}
    saved_rule = replace(base, **_read_fields(ScaleRule, torchs))
    first = {"scale": entries["scale"], "growth_tracker": entries["_growth_tracker"]}
    saved = entries.get(_STATES) or [first] * losses
    if not isinstance(saved, list) or not all(isinstance(scale, Mapping) for scale in saved):
        raise ScalerError(
            f"The states of the losses are {saved!r:.80}, not a list of dictionaries. {_REMEDY}"
        )
    if len(saved) != losses:
        raise ScalerError(
            f"The state dict has {len(saved)} losses, this scaler {losses}. Construct it with"
            f" GradScaler(num_losses={len(saved)})."
        )
    states = ({**saved[0], **first}, *saved[1:])
    return [_read_state(state, saved_rule) for state in states], saved_rule


def _check_entries(entries: object) -> None:
    if not isinstance(entries, Mapping):
        raise ScalerError(
            f"This is not the state dict of a scaler: {entries!r:.80} is not a dictionary."
            f" {_REMEDY}"
        )
    if not entries:
        raise ScalerError(
            "The state dict is empty: it was saved from a scaler that was not enabled. Do not load"
            " it, or save it from an enabled scaler."
        )
    missing = [name for name in _TORCH_ENTRIES if name not in entries]
    if missing:
        raise ScalerError(
            f"This is not the state dict of a scaler: it lacks {', '.join(missing)}. {_REMEDY}"
        )


def _read_state(entries: Mapping[str, Any], rule: ScaleRule) -> ScaleState:
    values = _read_fields(ScaleState, entries)
    scale = float(values["scale"]) if "scale" in values else math.nan
    if not is_scale(scale):
        raise ScalerError(
            f"The saved scale is {scale!r}, which no gradient survives. Start again from a positive"
            " finite scale, such as 65536.0."
        )
    return ScaleState(**{**values, "scale": rule.clamp(scale)})


def _read_fields(kind: type[ScaleRule | ScaleState], entries: Any) -> dict[str, Any]:
    """Return the entries that are fields of `kind`; ignore others, which a later version saved."""
    if not isinstance(entries, Mapping):
        raise ScalerError(
            f"The saved {kind.__name__} is {entries!r:.80}, not a dictionary. {_REMEDY}"
        )
    return {
        field.name: _read_field(field, entries[field.name])
        for field in fields(kind)
        if field.name in entries
    }


def _read_field(field: Field[Any], value: Any) -> Any:
    """Return a saved value with the type of the field's default."""
    if isinstance(field.default, bool):
        allowed, ok = "True or False", isinstance(value, bool)
    elif isinstance(field.default, int):
        allowed = "a whole number of at least 0"
        ok = _is_number(value) and value == value // 1 and value >= 0
    else:
        allowed, ok = "a number", _is_number(value)
    if not ok:
        raise ScalerError(
            f"The saved {field.name} is {value!r:.80}, and must be {allowed}. {_REMEDY}"
        )
    kind: Any = type(field.default)
    return kind(value)


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
