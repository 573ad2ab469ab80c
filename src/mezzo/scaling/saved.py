"""A scaler's state as a dictionary that torch's scaler and mezzo's both read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from mezzo._errors import ScalerError
from mezzo.scaling.state import ScaleRule, ScaleState, is_scale

_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_RULE, _STATES = "mezzo_rule", "mezzo_states"


def to_dict(states: list[ScaleState], rule: ScaleRule) -> dict[str, Any]:
    """torch's five entries, and under names that torch ignores everything else."""
    return {
        "scale": states[0].scale,
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": states[0].good_in_a_row,
        _RULE: asdict(rule),
        _STATES: [asdict(state) for state in states],
    }


def from_dict(entries: Mapping[str, Any], rule: ScaleRule, losses: int) -> tuple[list[ScaleState], ScaleRule]:
    """Read what `to_dict` or torch's scaler wrote, whole or not at all.

    torch's five entries are public, and win over mezzo's own where they differ: somebody has edited them. The scale and the growth tracker are those of the
    first loss.
    """
    if not entries:
        raise ScalerError("The state is empty: it was saved from a scaler that was not enabled. Leave it out, or save it from an enabled one.")
    missing = [name for name in _TORCH if name not in entries]
    if missing:
        raise ScalerError(f"This is not the state of a scaler: {', '.join(missing)} missing. Pass what scaler.state_dict() returned.")
    own = ScaleRule(**_known(ScaleRule, entries[_RULE])) if _RULE in entries else rule
    read = replace(own, growth_factor=entries["growth_factor"], backoff_factor=entries["backoff_factor"], growth_interval=entries["growth_interval"])
    public = {"scale": entries["scale"], "good_in_a_row": int(entries["_growth_tracker"])}
    saved = entries.get(_STATES) or [public] * losses
    if len(saved) != losses:
        raise ScalerError(f"The state has {len(saved)} losses, this scaler {losses}. Make it with GradScaler(losses={len(saved)}).")
    return [_state(state, read) for state in ({**saved[0], **public}, *saved[1:])], read


def _state(entries: Mapping[str, Any], rule: ScaleRule) -> ScaleState:
    scale = float(entries["scale"])
    if not is_scale(scale):
        raise ScalerError(f"The saved scale is {scale!r}, which no gradient survives. Start again from a positive finite scale, such as 65536.0.")
    return ScaleState(**{**_known(ScaleState, entries), "scale": rule.clamp(scale)})


def _known(kind: type, entries: Mapping[str, Any]) -> dict[str, Any]:
    """What this version knows of: a later one may have saved more."""
    return {field.name: entries[field.name] for field in fields(kind) if field.name in entries}
