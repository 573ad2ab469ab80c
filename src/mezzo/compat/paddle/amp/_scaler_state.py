"""What a scaler of Paddle's was told and what it saves, and how both translate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mezzo
from mezzo.scaling.saved import to_dict
from mezzo.scaling.state import LARGEST, SMALLEST, ScaleRule, ScaleState, float32

_PATIENCE = 1000
"""Skipped steps in a row before it is said that something else is wrong. Paddle never says so: a program that it let run for long runs here too."""


@dataclass(frozen=True)
class Told:
    """The parameters of a scaler, in Paddle's words."""

    init_loss_scaling: float
    """The scale that it starts from."""
    incr_ratio: float
    """What the scale is multiplied by when it grows."""
    decr_ratio: float
    """What the scale is multiplied by when it backs off."""
    incr_every_n_steps: int
    """Good steps in a row before the scale grows; 0 never grows."""
    decr_every_n_nan_or_inf: int
    """Bad steps in a row before the scale backs off; 0 never backs off."""
    use_dynamic_loss_scaling: bool
    """Whether the scale changes at all."""
    min_scale: float = SMALLEST
    """Paddle's eager scaler has no floor: this is the smallest scale that can be divided by. A static program's is 1."""

    def __post_init__(self) -> None:
        above_one("incr_ratio", self.incr_ratio)
        below_one("decr_ratio", self.decr_ratio)

    @property
    def rule(self) -> ScaleRule:
        """The same in mezzo's words. Paddle multiplies in float32."""
        return ScaleRule(
            growth_factor=float32(self.incr_ratio),
            backoff_factor=float32(self.decr_ratio),
            growth_interval=self.incr_every_n_steps,
            backoff_every=self.decr_every_n_nan_or_inf,
            min_scale=self.min_scale,
            max_scale=LARGEST,
            dynamic=self.use_dynamic_loss_scaling,
        )

    def make(self, *, enabled: bool = True) -> mezzo.GradScaler:
        """A scaler that does as told."""
        scaler = mezzo.GradScaler(init_scale=self.init_loss_scaling, enabled=enabled, patience=_PATIENCE)
        # Of a loss computed in bfloat16 the dialect speaks itself.
        scaler.advises = False
        self.apply(scaler, ScaleState(float32(self.init_loss_scaling)))
        return scaler

    def apply(self, scaler: mezzo.GradScaler, state: ScaleState) -> None:
        """Let a scaler do as told from a state on."""
        if scaler.is_enabled():
            scaler.load_state_dict(to_dict([state], self.rule))


def saved(told: Told, state: ScaleState) -> dict[str, Any]:
    """What `state_dict` gives: Paddle's entries. The scale is a tensor of one element, for torch.load reads those safely."""
    return {
        "scale": torch.tensor([state.scale], dtype=torch.float32),
        "incr_ratio": told.incr_ratio,
        "decr_ratio": told.decr_ratio,
        "incr_every_n_steps": told.incr_every_n_steps,
        "decr_every_n_nan_or_inf": told.decr_every_n_nan_or_inf,
        "incr_count": state.good_in_a_row,
        "decr_count": state.bad_counted,
        "use_dynamic_loss_scaling": told.use_dynamic_loss_scaling,
    }


def loaded(entries: Mapping[str, Any], min_scale: float) -> tuple[Told, ScaleState]:
    """Read what `saved` wrote, or Paddle itself; a scale may be an array, a tensor or a number."""
    if not entries:
        raise RuntimeError(
            "The input state dict is empty, possibly because it was saved from a disabled instance of GradScaler. Leave it out, or save it from an enabled one."
        )
    scale = float(torch.as_tensor(entries["scale"]).reshape(-1)[0])
    told = Told(
        scale,
        entries["incr_ratio"],
        entries["decr_ratio"],
        entries["incr_every_n_steps"],
        entries["decr_every_n_nan_or_inf"],
        bool(entries["use_dynamic_loss_scaling"]),
        min_scale,
    )
    return told, ScaleState(scale, good_in_a_row=entries["incr_count"], bad_counted=entries["decr_count"])


def above_one(name: str, value: float) -> None:
    """Refuse a ratio that would not grow."""
    if not value > 1.0:
        raise AssertionError(f"The {name} must be > 1.0. It is {value!r}.")


def below_one(name: str, value: float) -> None:
    """Refuse a ratio that would not shrink."""
    if not value < 1.0:
        raise AssertionError(f"The {name} must be < 1.0. It is {value!r}.")
