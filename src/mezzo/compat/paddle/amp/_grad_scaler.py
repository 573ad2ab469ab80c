"""`paddle.amp.GradScaler` and `AmpScaler`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import mezzo
from mezzo.compat.paddle.amp._scaler_parameters import (
    ScalerParameters,
    check_above_one,
    check_below_one,
    check_scale,
    parse_state_dict,
)
from mezzo.compat.paddle.nn._clip import hook_clip
from mezzo.scaling.diagnostics import half_dtypes
from mezzo.scaling.scale_state import OptimizerStage
from mezzo.scaling.step_result import StepResult

Optimizer = torch.optim.Optimizer


def _check_optimizer(method: str, optimizer: Any) -> None:
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{method}() takes an optimizer, but received {type(optimizer).__name__}. Pass one of"
            " paddle.optimizer."
        )


class _ScalerAccessors:
    """Getters, setters and the state dict of Paddle's scalers.

    Paddle's getters fail on a disabled scaler; these return what was passed to its constructor.
    """

    _parameters: ScalerParameters
    _scaler: mezzo.GradScaler
    _last_result: StepResult | None

    def is_enable(self) -> bool:
        """Return whether this scaler is enabled."""
        return self._scaler.is_enabled()

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Return whether the loss scale adapts."""
        return self._parameters.use_dynamic_loss_scaling

    def get_init_loss_scaling(self) -> float:
        """Return the loss scale that was last passed, set or loaded."""
        return self._parameters.init_loss_scaling

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the loss scale; the counters stay."""
        check_scale("new_init_loss_scaling", new_init_loss_scaling)
        scale = float(new_init_loss_scaling)
        self._parameters = replace(self._parameters, init_loss_scaling=scale)
        if self.is_enable():
            self._parameters.load_into(self._scaler, replace(self._scaler.state(), scale=scale))

    def get_incr_ratio(self) -> float:
        """Return the factor by which the loss scale grows."""
        return self._parameters.incr_ratio

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Set the factor by which the loss scale grows."""
        check_above_one("new_incr_ratio", new_incr_ratio)
        self._change(incr_ratio=new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """Return the factor by which the loss scale backs off."""
        return self._parameters.decr_ratio

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Set the factor by which the loss scale backs off."""
        check_below_one("new_decr_ratio", new_decr_ratio)
        self._change(decr_ratio=new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Return how many successful steps in a row make the loss scale grow."""
        return self._parameters.incr_every_n_steps

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Set how many successful steps in a row make the loss scale grow."""
        self._change(incr_every_n_steps=new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Return how many skipped steps in a row make the loss scale back off."""
        return self._parameters.decr_every_n_nan_or_inf

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Set how many skipped steps in a row make the loss scale back off."""
        self._change(decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return Paddle's entries, or an empty dict if the scaler is disabled."""
        return self._parameters.to_state_dict(self._scaler.state()) if self.is_enable() else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, also one that Paddle saved; do nothing if the scaler is disabled."""
        if self.is_enable():
            self._parameters, state = parse_state_dict(state_dict, self._parameters.min_scale)
            self._parameters.load_into(self._scaler, state)

    def _change(self, **changes: Any) -> None:
        self._parameters = replace(self._parameters, **changes)
        if self.is_enable():
            self._parameters.load_into(self._scaler, self._scaler.state())

    # -- private attributes of Paddle's scaler that programs read ----------------------------------

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
        return self._last_result is not None and self._last_result.skipped


class AmpScaler(_ScalerAccessors):
    """`paddle.amp.AmpScaler`: `GradScaler` with older defaults (2^15, growth every 1000 steps).

    Scales losses, skips steps with non-finite gradients and adapts the loss scale.

    Differences from Paddle:

    - it works on a CPU, and before the first `auto_cast`;
    - each optimizer is skipped by its own gradients only, and a skipped step does not block a later
      plain `optimizer.step()`;
    - the loss scale stays finite and positive;
    - `update()` without a step, and `step()` twice, raise;
    - skipped steps are not printed.

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
        check_scale("init_loss_scaling", init_loss_scaling)
        self._parameters = ScalerParameters(
            float(init_loss_scaling),
            incr_ratio,
            decr_ratio,
            incr_every_n_steps,
            decr_every_n_nan_or_inf,
            bool(use_dynamic_loss_scaling),
        )
        self._scaler = self._parameters.make_scaler(enabled=bool(enable))
        self._stages: dict[int, OptimizerStage] = {}
        """Stage of each optimizer, by id, since the last update."""
        self._last_result: StepResult | None = None
        """Result of the last step."""
        self._loss_dtype_checked = False

    def scale(self, var: Any) -> Any:
        """Multiply a loss by the loss scale.

        A loss that was computed in bfloat16 needs no scaling: as in Paddle, dynamic loss scaling is
        then disabled with a warning.
        """
        if not self._loss_dtype_checked and isinstance(var, torch.Tensor):
            self._loss_dtype_checked = True
            if (
                self.is_enable()
                and self._parameters.use_dynamic_loss_scaling
                and half_dtypes(var) == {torch.bfloat16}
            ):
                warnings.warn(
                    "It is not recommended to use dynamic loss scaling for bfloat16, so GradScaler"
                    " is disable by default. bfloat16 has the range of float32. Pass"
                    " GradScaler(enable=False) to silence this warning.",
                    UserWarning,
                    stacklevel=2,
                )
                self._scaler = mezzo.GradScaler(enabled=False)
        return self._scaler.scale(var)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients in place, to clip or inspect them before the step."""
        _check_optimizer("unscale_", optimizer)
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
        """Unscale gradients and step, or skip the step if a gradient is non-finite.

        Call `update()` afterwards, unless the loss scale is fixed.
        """
        _check_optimizer("step", optimizer)
        if not self.is_enable():
            optimizer.step()
            return
        if self._stages.get(id(optimizer)) is OptimizerStage.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() after each"
                " step()."
            )
        if hook_clip(optimizer) is not None and id(optimizer) not in self._stages:
            # The optimizer's step hook clips the gradients it finds: they must be unscaled.
            self.unscale_(optimizer)
        self._last_result = self._scaler.step(optimizer)
        self._stages[id(optimizer)] = OptimizerStage.STEPPED
        if not self._parameters.use_dynamic_loss_scaling:
            self._start_next_iteration()

    def update(self) -> None:
        """Adapt the loss scale to the steps since the last update; a fixed scale stays."""
        if self.is_enable() and self._parameters.use_dynamic_loss_scaling:
            self._start_next_iteration()

    def minimize(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call `step` and `update`.

        Other arguments are accepted without effect: as in Paddle, the loss has been run backward
        already.
        """
        _check_optimizer("minimize", optimizer)
        self.step(optimizer)
        self.update()
        return None, [
            (parameter, parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _start_next_iteration(self) -> None:
        self._scaler.update()
        self._stages.clear()


class GradScaler(AmpScaler):
    """`paddle.amp.GradScaler`: scale losses, skip non-finite steps, adapt the loss scale.

    The defaults are those of Paddle 3: 2^16, doubled after 2000 successful steps and halved after
    1 skipped step. Paddle's guide still has those of an older version: 2^15, 1000 and 2. See
    `AmpScaler` for the other differences.

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
