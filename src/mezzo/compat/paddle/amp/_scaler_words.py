"""What a scaler of Paddle's can be asked and told after it was made, and what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import mezzo
from mezzo.compat.paddle.amp._scaler_state import Told, above_one, below_one, loaded, saved
from mezzo.scaling.result import StepResult


class ScalerWords:
    """Getters, setters and states. Paddle's getters fail where the scaler is not enabled; these give what it was made with."""

    _told: Told
    _scaler: mezzo.GradScaler
    _last: StepResult | None

    def is_enable(self) -> bool:
        """Whether this scaler does anything."""
        return self._scaler.is_enabled()

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale adapts."""
        return self._told.use_dynamic_loss_scaling

    def get_init_loss_scaling(self) -> float:
        """The scale that it started from, was set to, or was loaded with."""
        return self._told.init_loss_scaling

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the scale; the counters stay."""
        self._told = replace(self._told, init_loss_scaling=float(new_init_loss_scaling))
        if self.is_enable():
            self._told.apply(self._scaler, replace(self._scaler.state(), scale=self._told.init_loss_scaling))

    def get_incr_ratio(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self._told.incr_ratio

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Set what the scale is multiplied by when it grows."""
        above_one("new_incr_ratio", new_incr_ratio)
        self._tell(incr_ratio=new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """What the scale is multiplied by when it backs off."""
        return self._told.decr_ratio

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Set what the scale is multiplied by when it backs off."""
        below_one("new_decr_ratio", new_decr_ratio)
        self._tell(decr_ratio=new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Good steps in a row before the scale grows."""
        return self._told.incr_every_n_steps

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Set how many good steps in a row make the scale grow."""
        self._tell(incr_every_n_steps=new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Bad steps in a row before the scale backs off."""
        return self._told.decr_every_n_nan_or_inf

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Set how many bad steps in a row make the scale back off."""
        self._tell(decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    def state_dict(self) -> dict[str, Any]:
        """Paddle's entries, the scale as a tensor of one element; empty where the scaler is not enabled."""
        return saved(self._told, self._scaler.state()) if self.is_enable() else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, also one that Paddle saved; nothing happens where the scaler is not enabled."""
        if self.is_enable():
            self._told, state = loaded(state_dict, self._told.min_scale)
            self._told.apply(self._scaler, state)

    def _tell(self, **words: Any) -> None:
        self._told = replace(self._told, **words)
        if self.is_enable():
            self._told.apply(self._scaler, self._scaler.state())

    # -- what programs read though it is not public there --------------------------------------------------------------------------------------------

    @property
    def _scale(self) -> torch.Tensor:
        return torch.tensor([self._scaler.state().scale if self.is_enable() else 1.0])

    @property
    def _incr_count(self) -> int:
        return self._scaler.state().good_in_a_row if self.is_enable() else 0

    @property
    def _decr_count(self) -> int:
        return self._scaler.state().bad_counted if self.is_enable() else 0

    @property
    def _found_inf(self) -> bool:
        return self._last is not None and self._last.skipped
