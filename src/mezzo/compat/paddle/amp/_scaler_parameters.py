"""The parameters of loss scaling under Paddle's names, and the state dict that Paddle saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

import mezzo
from mezzo.scaling.scale_state import (
    LARGEST,
    SMALLEST,
    ScaleRule,
    ScaleState,
    float32,
    scaler_to_dict,
)

_COLLAPSE_PATIENCE = 1000
"""Consecutive skipped steps before the warning about scale collapse. Paddle never warns, so this is
high: programs that skip for a while under Paddle stay quiet here."""


@dataclass(frozen=True)
class ScalerParameters:
    """Parameters of a scaler, under Paddle's names."""

    init_loss_scaling: float
    """The first loss scale."""
    incr_ratio: float
    """Factor by which the loss scale grows."""
    decr_ratio: float
    """Factor by which the loss scale backs off."""
    incr_every_n_steps: int
    """Successful steps in a row before the loss scale grows; 0 never grows."""
    decr_every_n_nan_or_inf: int
    """Skipped steps in a row before the loss scale backs off; 0 never backs off."""
    use_dynamic_loss_scaling: bool
    """Whether the loss scale changes at all."""
    min_scale: float = SMALLEST
    """Paddle's eager scaler has no floor: the default is the smallest scale that can be divided by.
    In static programs the floor is 1."""

    def __post_init__(self) -> None:
        check_scale("init_loss_scaling", self.init_loss_scaling)
        check_above_one("incr_ratio", self.incr_ratio)
        check_below_one("decr_ratio", self.decr_ratio)
        _check_steps("incr_every_n_steps", self.incr_every_n_steps)
        _check_steps("decr_every_n_nan_or_inf", self.decr_every_n_nan_or_inf)

    @property
    def rule(self) -> ScaleRule:
        """The equivalent rule in mezzo. Paddle multiplies in float32."""
        return ScaleRule(
            growth_factor=float32(self.incr_ratio),
            backoff_factor=float32(self.decr_ratio),
            growth_interval=self.incr_every_n_steps,
            backoff_interval=self.decr_every_n_nan_or_inf,
            min_scale=self.min_scale,
            max_scale=LARGEST,
            dynamic=self.use_dynamic_loss_scaling,
        )

    def make_scaler(self, *, enabled: bool = True) -> mezzo.GradScaler:
        """Return a scaler with these parameters."""
        scaler = mezzo.GradScaler(
            init_scale=self.init_loss_scaling, enabled=enabled, collapse_patience=_COLLAPSE_PATIENCE
        )
        # This dialect has its own warning about bfloat16 losses.
        scaler._warns_if_not_needed = False
        self.load_into(scaler, ScaleState(float32(self.init_loss_scaling)))
        return scaler

    def load_into(self, scaler: mezzo.GradScaler, state: ScaleState) -> None:
        """Give a scaler these parameters and a state."""
        if scaler.is_enabled():
            scaler.load_state_dict(scaler_to_dict([state], self.rule))

    def to_state_dict(self, state: ScaleState) -> dict[str, Any]:
        """Return the entries that Paddle saves.

        The loss scale is a tensor of one element, which `torch.load(weights_only=True)` can read.
        """
        return {
            "scale": torch.tensor([state.scale], dtype=torch.float32),
            "incr_ratio": self.incr_ratio,
            "decr_ratio": self.decr_ratio,
            "incr_every_n_steps": self.incr_every_n_steps,
            "decr_every_n_nan_or_inf": self.decr_every_n_nan_or_inf,
            "incr_count": state.growth_tracker,
            "decr_count": state.backoff_tracker,
            "use_dynamic_loss_scaling": self.use_dynamic_loss_scaling,
        }


def parse_state_dict(
    entries: Mapping[str, Any], min_scale: float
) -> tuple[ScalerParameters, ScaleState]:
    """Read a state dict of this module or of Paddle itself.

    The loss scale may be an array, a tensor or a number.
    """
    if isinstance(entries, Mapping) and not entries:
        raise RuntimeError(
            "The input state dict is empty, possibly because it was saved from a disabled instance"
            " of GradScaler. Leave it out, or save it from an enabled one."
        )
    if not isinstance(entries, Mapping):
        raise TypeError(
            f"load_state_dict() takes what state_dict() returned, but received"
            f" {type(entries).__name__}."
        )
    if missing := [name for name in _STATE_ENTRIES if name not in entries]:
        raise KeyError(
            f"The state dict has no {', '.join(missing)}. Pass what state_dict() of a GradScaler"
            " returned."
        )
    scale = float(torch.as_tensor(entries["scale"]).reshape(-1)[0])
    parameters = ScalerParameters(
        scale,
        entries["incr_ratio"],
        entries["decr_ratio"],
        entries["incr_every_n_steps"],
        entries["decr_every_n_nan_or_inf"],
        bool(entries["use_dynamic_loss_scaling"]),
        min_scale,
    )
    return parameters, ScaleState(
        scale, growth_tracker=entries["incr_count"], backoff_tracker=entries["decr_count"]
    )


_STATE_ENTRIES = (
    "scale",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_count",
    "decr_count",
    "use_dynamic_loss_scaling",
)
"""Entries of a state dict that Paddle saves."""


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}. It should be a number.")


def check_scale(name: str, value: Any) -> None:
    """Raise unless a loss scale is a positive finite number."""
    _check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"The {name} must be a positive finite number. It is {value!r}.")


def _check_steps(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"The {name} must be a number of steps, 0 or more. It is {value!r}.")


def check_above_one(name: str, value: float) -> None:
    """Raise unless a ratio is above one."""
    _check_number(name, value)
    if not value > 1.0:
        raise AssertionError(f"The {name} must be > 1.0. It is {value!r}.")


def check_below_one(name: str, value: float) -> None:
    """Raise unless a ratio is below one."""
    _check_number(name, value)
    if not value < 1.0:
        raise AssertionError(f"The {name} must be < 1.0. It is {value!r}.")
