"""A scaler's state as a dictionary that torch's scaler and mezzo's both read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, fields, replace
from typing import Any

import torch

from mezzo._errors import ScalerError
from mezzo.scaling.state import ScaleRule, ScaleState, is_scale

_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_REMEDY = "Pass what scaler.state_dict() returned."
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
    if not isinstance(entries, Mapping):
        raise ScalerError(f"This is not the state of a scaler: {entries!r:.80} is no dictionary. {_REMEDY}")
    if not entries:
        raise ScalerError("The state is empty: it was saved from a scaler that was not enabled. Leave it out, or save it from an enabled one.")
    missing = [name for name in _TORCH if name not in entries]
    if missing:
        raise ScalerError(f"This is not the state of a scaler: {', '.join(missing)} missing. {_REMEDY}")
    own = ScaleRule(**_known(ScaleRule, entries[_RULE])) if _RULE in entries else rule
    read = replace(own, **_known(ScaleRule, {name: entries[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}))
    public = {"scale": entries["scale"], "good_in_a_row": entries["_growth_tracker"]}
    saved = entries.get(_STATES) or [public] * losses
    if not isinstance(saved, list) or not all(isinstance(one, Mapping) for one in saved):
        raise ScalerError(f"The states of the losses are {saved!r:.80}, not a list of dictionaries. {_REMEDY}")
    if len(saved) != losses:
        raise ScalerError(f"The state has {len(saved)} losses, this scaler {losses}. Make it with GradScaler(losses={len(saved)}).")
    return [_state(state, read) for state in ({**saved[0], **public}, *saved[1:])], read


def _state(entries: Mapping[str, Any], rule: ScaleRule) -> ScaleState:
    known = _known(ScaleState, entries)
    scale = float(known["scale"]) if "scale" in known else math.nan
    if not is_scale(scale):
        raise ScalerError(f"The saved scale is {scale!r}, which no gradient survives. Start again from a positive finite scale, such as 65536.0.")
    return ScaleState(**{**known, "scale": rule.clamp(scale)})


def _known(kind: type[ScaleRule | ScaleState], entries: Any) -> dict[str, Any]:
    """What this version knows of, each a number or a flag as it must be: a later one may have saved more."""
    if not isinstance(entries, Mapping):
        raise ScalerError(f"The saved {kind.__name__} is {entries!r:.80}, not a dictionary. {_REMEDY}")
    return {field.name: _value(field, entries[field.name]) for field in fields(kind) if field.name in entries}


def _value(field: Field[Any], value: Any) -> Any:
    if isinstance(field.default, bool):
        wanted, fits = "True or False", isinstance(value, bool)
    elif isinstance(field.default, int):
        wanted, fits = "a whole number of at least 0", _is_number(value) and value == value // 1 and value >= 0
    else:
        wanted, fits = "a number", _is_number(value)
    if not fits:
        raise ScalerError(f"The saved {field.name} is {value!r:.80}, and must be {wanted}. {_REMEDY}")
    made: Any = type(field.default)
    return made(value)


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
