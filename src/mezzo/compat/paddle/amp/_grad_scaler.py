"""`GradScaler` and `AmpScaler`: Paddle's names and counters on mezzo's scaler."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import mezzo
from mezzo.compat.paddle._clip import clip_of
from mezzo.compat.paddle.amp._scaler_state import Told
from mezzo.compat.paddle.amp._scaler_words import ScalerWords
from mezzo.scaling.needless import half_dtypes
from mezzo.scaling.result import StepResult
from mezzo.scaling.words import Stage

Optimizer = torch.optim.Optimizer


class AmpScaler(ScalerWords):
    """Scales losses, skips steps whose gradients are not finite, and adapts the scale: `GradScaler` with older defaults (2^15, grown every 1000 steps).

    It differs from Paddle's where that surprises. It works on a CPU, and before any `auto_cast`. Each optimizer is skipped by its own gradients, and keeps no
    flag that would block a later plain step. The scale stays finite and positive. `update()` without a step, and stepping twice, are errors. Nothing is printed.

    >>> scaler = AmpScaler(init_loss_scaling=1024.0)
    >>> scaler.scale(torch.tensor(0.5))
    tensor(512.)
    """

    def __init__(
        self,
        enable: bool = True,  # noqa: FBT001, FBT002 - Paddle's call shape
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        ratios = (incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
        self._told = Told(float(init_loss_scaling), *ratios, bool(use_dynamic_loss_scaling))
        self._scaler = self._told.make(enabled=bool(enable))
        self._stages: dict[int, Stage] = {}
        """Where each optimizer stands since the last update."""
        self._last: StepResult | None = None
        """What became of the last step."""
        self._looked = False

    def scale(self, var: Any) -> Any:
        """Multiply a loss by the scale. A loss that was computed in bfloat16 needs none: as in Paddle, dynamic scaling then ends, with a warning."""
        if not self._looked and isinstance(var, torch.Tensor):
            self._looked = True
            if self.is_enable() and self._told.use_dynamic_loss_scaling and half_dtypes(var) == {torch.bfloat16}:
                warnings.warn(
                    "It is not recommended to use dynamic loss scaling for bfloat16, so GradScaler is disable by default. "
                    "bfloat16 has the range of float32: GradScaler(enable=False) says that this is meant.",
                    UserWarning,
                    stacklevel=2,
                )
                self._scaler = mezzo.GradScaler(enabled=False)
        return self._scaler.scale(var)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale in place, to clip or look at them before the step."""
        if not self.is_enable():
            return
        stage = self._stages.get(id(optimizer), Stage.READY)
        if stage is Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update(). Call it once for each step.")
        if stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step(). Call it between backward() and step().")
        self._scaler.unscale_(optimizer)
        self._stages[id(optimizer)] = Stage.UNSCALED

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters from unscaled gradients, or skip the step if one is not finite. Follow it by `update()`, unless the scale is fixed."""
        if not self.is_enable():
            optimizer.step()
            return
        if self._stages.get(id(optimizer)) is Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update(). Call update() after each step().")
        if clip_of(optimizer) is not None and id(optimizer) not in self._stages:
            # It clips what it finds when it steps: that has to be unscaled.
            self.unscale_(optimizer)
        self._last = self._scaler.step(optimizer)
        self._stages[id(optimizer)] = Stage.STEPPED
        if not self._told.use_dynamic_loss_scaling:
            self._begin_anew()

    def update(self) -> None:
        """Adapt the scale to what the steps since the last update found; a fixed scale has nothing to adapt."""
        if self.is_enable() and self._told.use_dynamic_loss_scaling:
            self._begin_anew()

    def minimize(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG002 - the loss has been run backward already
        """`step` and `update` in one. The loss is taken as in Paddle, which does not run it backward either."""
        self.step(optimizer)
        self.update()
        return None, [(one, one.grad) for group in optimizer.param_groups for one in group["params"] if one.grad is not None]

    def _begin_anew(self) -> None:
        self._scaler.update()
        self._stages.clear()


class GradScaler(AmpScaler):
    """Scales losses, skips steps whose gradients are not finite, and adapts the scale.

    The defaults are those of Paddle 3: 2^16, doubled after 2000 good steps and halved after 1 bad one. Its guide still names those of an older version: 2^15,
    1000 and 2. What else differs is said at `AmpScaler`.

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
        enable: bool = True,  # noqa: FBT001, FBT002 - Paddle's call shape
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(enable, init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf, use_dynamic_loss_scaling)
