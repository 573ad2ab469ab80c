"""`amp_configs` of `Model.prepare`: Paddle's keys, refused as there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mezzo._errors import nearest
from mezzo.compat.paddle._clip import ClipGradByGlobalNorm, ClipGradByNorm

_LEVELS = ("O0", "O1", "O2")
_LISTS = ("custom_white_list", "custom_black_list")
_SCALING = ("init_loss_scaling", "incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf", "use_dynamic_loss_scaling")


@dataclass(frozen=True)
class AmpConfigs:
    """What a model trains in."""

    level: str = "O0"
    lists: dict[str, Any] = field(default_factory=dict)
    """For `auto_cast`."""
    scaling: dict[str, Any] = field(default_factory=dict)
    """For `GradScaler`."""


def read(words: Any, optimizer: Any) -> AmpConfigs:
    """Read a level, or a level and what `auto_cast` and `GradScaler` take."""
    if not words:
        return AmpConfigs()
    if isinstance(words, str):
        if words not in _LEVELS:
            raise ValueError(f"The level of amp_configs should be 'O0', 'O1' or 'O2'. It is {words!r}.")
        _refuse_clipping(words, optimizer)
        return AmpConfigs(words)
    if not isinstance(words, dict):
        raise TypeError(f"amp_configs={words!r} is {type(words).__name__}. It should be 'O0', 'O1' or 'O2', or a dict with a 'level'.")
    level = words.get("level", "O1")
    if level not in _LEVELS:
        raise ValueError(f"amp_configs['level'] should be 'O0', 'O1' or 'O2'. It is {level!r}.")
    if level == "O0":
        return AmpConfigs()
    _refuse_keys(words.keys() - {"level"})
    # Paddle forgets to ask where the level is the only key.
    _refuse_clipping(level, optimizer)
    return AmpConfigs(level, {key: words[key] for key in _LISTS if key in words}, {key: words[key] for key in _SCALING if key in words})


def _refuse_keys(keys: set[str]) -> None:
    if "use_pure_fp16" in keys:
        raise ValueError("'use_pure_fp16' is an invalid parameter, the level of mixed precision training only depends on 'O1' or 'O2'.")
    if "use_fp16_guard" in keys:
        raise ValueError("'use_fp16_guard' is supported in static graph mode only, and Model runs eagerly here. Use static.amp.decorate.")
    if "custom_black_varnames" in keys:
        raise ValueError("'custom_black_varnames' names variables, which have no names here. Use custom_black_list.")
    strange = sorted(keys - {*_LISTS, *_SCALING})
    if strange:
        raise ValueError(
            "Except for 'level', the keys of 'amp_configs' must be accepted by mixed precision APIs, but "
            f"({', '.join(map(repr, strange))}) could not be recognized.{nearest(strange[0], (*_LISTS, *_SCALING))}"
        )


def _refuse_clipping(level: str, optimizer: Any) -> None:
    clip = getattr(optimizer, "_grad_clip", None)
    if level == "O2" and clip is not None and not isinstance(clip, ClipGradByGlobalNorm | ClipGradByNorm):
        raise AssertionError(f"Only ClipGradByNorm and ClipGradByGlobalNorm are supported in amp training with level=O2 currently. It is {clip!r}.")
