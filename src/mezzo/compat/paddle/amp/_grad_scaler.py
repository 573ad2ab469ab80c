"""`paddle.amp.GradScaler` and its saved state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import mezzo
from mezzo.compat.paddle.nn import clip_of
from mezzo.scaling.diagnostics import half_dtypes
from mezzo.scaling.scale_state import (
    LARGEST,
    SMALLEST,
    OptimizerStage,
    ScaleRule,
    ScaleState,
    float32,
    scaler_to_dict,
)
from mezzo.scaling.step_result import StepResult

_PATIENCE = 1000
"""Skipped steps in a row before it is said that something else is wrong. Paddle never says so: a
program that it let run for long runs here too."""


@dataclass(frozen=True)
class ScalerParameters:
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
    """Paddle's eager scaler has no floor: this is the smallest scale that can be divided by. A
    static program's is 1."""

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
            backoff_interval=self.decr_every_n_nan_or_inf,
            min_scale=self.min_scale,
            max_scale=LARGEST,
            dynamic=self.use_dynamic_loss_scaling,
        )

    def make(self, *, enabled: bool = True) -> mezzo.GradScaler:
        """A scaler that does as told."""
        scaler = mezzo.GradScaler(
            init_scale=self.init_loss_scaling, enabled=enabled, collapse_patience=_PATIENCE
        )
        # Of a loss computed in bfloat16 the dialect speaks itself.
        scaler._advises = False
        self.apply(scaler, ScaleState(float32(self.init_loss_scaling)))
        return scaler

    def apply(self, scaler: mezzo.GradScaler, state: ScaleState) -> None:
        """Let a scaler do as told from a state on."""
        if scaler.is_enabled():
            scaler.load_state_dict(scaler_to_dict([state], self.rule))


def saved(told: ScalerParameters, state: ScaleState) -> dict[str, Any]:
    """What `state_dict` gives: Paddle's entries. The scale is a tensor of one element, for torch.load reads those safely."""
    return {
        "scale": torch.tensor([state.scale], dtype=torch.float32),
        "incr_ratio": told.incr_ratio,
        "decr_ratio": told.decr_ratio,
        "incr_every_n_steps": told.incr_every_n_steps,
        "decr_every_n_nan_or_inf": told.decr_every_n_nan_or_inf,
        "incr_count": state.growth_tracker,
        "decr_count": state.backoff_tracker,
        "use_dynamic_loss_scaling": told.use_dynamic_loss_scaling,
    }


def loaded(entries: Mapping[str, Any], min_scale: float) -> tuple[ScalerParameters, ScaleState]:
    """Read what `saved` wrote, or Paddle itself; a scale may be an array, a tensor or a number."""
    if not entries:
        raise RuntimeError(
            "The input state dict is empty, possibly because it was saved from a disabled instance"
            " of GradScaler. Leave it out, or save it from an enabled one."
        )
    scale = float(torch.as_tensor(entries["scale"]).reshape(-1)[0])
    told = ScalerParameters(
        scale,
        entries["incr_ratio"],
        entries["decr_ratio"],
        entries["incr_every_n_steps"],
        entries["decr_every_n_nan_or_inf"],
        bool(entries["use_dynamic_loss_scaling"]),
        min_scale,
    )
    return told, ScaleState(
        scale, growth_tracker=entries["incr_count"], backoff_tracker=entries["decr_count"]
    )


def above_one(name: str, value: float) -> None:
    """Refuse a ratio that would not grow."""
    if not value > 1.0:
        raise AssertionError(f"The {name} must be > 1.0. It is {value!r}.")


def below_one(name: str, value: float) -> None:
    """Refuse a ratio that would not shrink."""
    if not value < 1.0:
        raise AssertionError(f"The {name} must be < 1.0. It is {value!r}.")


class ScalerOptions:
    """Getters, setters and states. Paddle's getters fail where the scaler is not enabled; these give what it was made with."""

    _told: ScalerParameters
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
            self._told.apply(
                self._scaler, replace(self._scaler.state(), scale=self._told.init_loss_scaling)
            )

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

    # -- what programs read though it is not public there ------------------------------------------

    @property
    def _scale(self) -> torch.Tensor:
        return torch.tensor([self._scaler.state().scale if self.is_enable() else 1.0])

    @property
    def _incr_count(self) -> int:
        return self._scaler.state().growth_tracker if self.is_enable() else 0

    @property
    def _decr_count(self) -> int:
        return self._scaler.state().backoff_tracker if self.is_enable() else 0

    @property
    def _found_inf(self) -> bool:
        return self._last is not None and self._last.skipped


Optimizer = torch.optim.Optimizer


class AmpScaler(ScalerOptions):
    """Scales losses, skips steps whose gradients are not finite, and adapts the scale: `GradScaler` with older defaults (2^15, grown every 1000 steps).

    It differs from Paddle's where that surprises. It works on a CPU, and before any `auto_cast`.
    Each optimizer is skipped by its own gradients, and keeps no flag that would block a later plain
    step. The scale stays finite and positive. `update()` without a step, and stepping twice, are
    errors. Nothing is printed.

    >>> scaler = AmpScaler(init_loss_scaling=1024.0)
    >>> scaler.scale(torch.tensor(0.5))
    tensor(512.)
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        ratios = (incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
        self._told = ScalerParameters(
            float(init_loss_scaling), *ratios, bool(use_dynamic_loss_scaling)
        )
        self._scaler = self._told.make(enabled=bool(enable))
        self._stages: dict[int, OptimizerStage] = {}
        """Where each optimizer stands since the last update."""
        self._last: StepResult | None = None
        """What became of the last step."""
        self._looked = False

    def scale(self, var: Any) -> Any:
        """Multiply a loss by the scale. A loss that was computed in bfloat16 needs none: as in Paddle, dynamic scaling then ends, with a warning."""
        if not self._looked and isinstance(var, torch.Tensor):
            self._looked = True
            if (
                self.is_enable()
                and self._told.use_dynamic_loss_scaling
                and half_dtypes(var) == {torch.bfloat16}
            ):
                warnings.warn(
                    "It is not recommended to use dynamic loss scaling for bfloat16, so GradScaler"
                    " is disable by default. bfloat16 has the range of float32:"
                    " GradScaler(enable=False) says that this is meant.",
                    UserWarning,
                    stacklevel=2,
                )
                self._scaler = mezzo.GradScaler(enabled=False)
        return self._scaler.scale(var)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale in place, to clip or look at them before the step."""
        if not self.is_enable():
            return
        stage = self._stages.get(id(optimizer), OptimizerStage.READY)
        if stage is OptimizerStage.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call"
                " it once for each step."
            )
        if stage is OptimizerStage.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(). Call it between backward() and step()."
            )
        self._scaler.unscale_(optimizer)
        self._stages[id(optimizer)] = OptimizerStage.UNSCALED

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters from unscaled gradients, or skip the step if one is not finite. Follow it by `update()`, unless the scale is fixed."""
        if not self.is_enable():
            optimizer.step()
            return
        if self._stages.get(id(optimizer)) is OptimizerStage.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() after each"
                " step()."
            )
        if clip_of(optimizer) is not None and id(optimizer) not in self._stages:
            # It clips what it finds when it steps: that has to be unscaled.
            self.unscale_(optimizer)
        self._last = self._scaler.step(optimizer)
        self._stages[id(optimizer)] = OptimizerStage.STEPPED
        if not self._told.use_dynamic_loss_scaling:
            self._begin_anew()

    def update(self) -> None:
        """Adapt the scale to what the steps since the last update found; a fixed scale has nothing to adapt."""
        if self.is_enable() and self._told.use_dynamic_loss_scaling:
            self._begin_anew()

    # The loss has been run backward already.
    def minimize(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """`step` and `update` in one. The loss is taken as in Paddle, which does not run it backward either."""
        self.step(optimizer)
        self.update()
        return None, [
            (one, one.grad)
            for group in optimizer.param_groups
            for one in group["params"]
            if one.grad is not None
        ]

    def _begin_anew(self) -> None:
        self._scaler.update()
        self._stages.clear()


class GradScaler(AmpScaler):
    """Scales losses, skips steps whose gradients are not finite, and adapts the scale.

    The defaults are those of Paddle 3: 2^16, doubled after 2000 good steps and halved after 1 bad
    one. Its guide still names those of an older version: 2^15, 1000 and 2. What else differs is
    said at `AmpScaler`.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler(init_loss_scaling=1024)
    >>> scaled = scaler.scale(model(torch.ones(1, 2)).sum())
    >>> scaled.backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.state_dict()["incr_count"]
    1
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        super().__init__(
            enable,
            init_loss_scaling,
            incr_ratio,
            decr_ratio,
            incr_every_n_steps,
            decr_every_n_nan_or_inf,
            use_dynamic_loss_scaling,
        )
