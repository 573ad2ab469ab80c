"""`mezzo.GradScaler`: loss scaling without synchronization, and without scale collapse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError
from mezzo.scaling import gradients, optimizer_step, scale_search, scale_state
from mezzo.scaling.diagnostics import CollapseMonitor, warn_if_not_needed
from mezzo.scaling.gradients import backward_isolated
from mezzo.scaling.loss_scales import LossScales, first_states
from mezzo.scaling.optimizer_records import OptimizerRecords
from mezzo.scaling.scale_state import LARGEST, OnCollapse, OptimizerStage, ScaleRule, ScaleState
from mezzo.scaling.scaler_schedules import Schedules, advance_scheduler
from mezzo.scaling.step_result import StepResult
from mezzo.scaling.torch_scaler_api import TorchScalerApi

Optimizer = torch.optim.Optimizer

_ENABLED_POSITION = 5
"""Position of `enabled` among torch's arguments."""


@dataclass(frozen=True)
class _Settings:
    """Arguments of the scaler that are not part of its rule or its state."""

    collapse_patience: int
    on_collapse: OnCollapse
    reduce_found_inf: Callable[[torch.Tensor], object] | None


class GradScaler(TorchScalerApi):
    """Loss scaling: scale losses, unscale gradients, skip non-finite steps, adapt the scale.

    Small gradients underflow to zero in float16. Multiplying the loss by a loss scale moves them
    into range; `step()` divides the gradients by it before the optimizer uses them. If a gradient
    is not finite, the optimizer step is skipped and `update()` backs the scale off; after enough
    successful steps it grows the scale.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu", init_scale=1024.0, min_scale=1.0)
    >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    >>> scaler.step(optimizer).skipped
    False
    >>> scaler.update()

    It takes the place of `torch.amp.GradScaler`, whose arguments and methods it has. Fused
    optimizers (torch's with `fused=True`, and those of `mezzo.decorate`) skip on the device, so
    that an iteration does not synchronize.

    Arguments of torch's scaler:

    - `device`: a CUDA device disables the scaler, with a warning, if CUDA is not available. Each
      scale is on the device of its loss, whatever is passed here.
    - `init_scale`: the loss scale to start with.
    - `growth_factor`, `backoff_factor`, `growth_interval`: fields of `ScaleRule`.
    - `enabled`: False gives a scaler that does nothing: losses are not scaled, and `step()` only
      steps the optimizer.

    Further arguments, by keyword:

    - `backoff_interval`, `consecutive_backoff`, `min_scale`, `max_scale`, `dynamic`,
      `warmup_steps`: fields of `ScaleRule`.
    - `num_losses`: number of losses with a scale each. With more than one, call `backward()`
      instead of `scale()`.
    - `collapse_patience`, `on_collapse`: warn ("warn") or raise `ScalerError` ("raise") when this
      many steps in a row were skipped, or when a step is skipped at `min_scale`. The message names
      the first parameter with a non-finite gradient.
    - `reduce_found_inf`: reduces the `found_inf` flag over a process group in place, by maximum or
      sum, so that all processes skip a step together. It is called once per check.
    """

    _warns_if_not_needed = True
    """Whether to warn that a bfloat16 loss needs no loss scaling."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a scaler, or a `DisabledGradScaler` if it is not enabled."""
        enabled = kwargs.get(
            "enabled", args[_ENABLED_POSITION] if len(args) > _ENABLED_POSITION else True
        )
        device = args[0] if args else kwargs.get("device")
        if (
            enabled
            and device is not None
            and torch.device(device).type == "cuda"
            and not torch.cuda.is_available()
        ):
            warnings.warn(
                f"GradScaler({str(device)!r}) is disabled, since no CUDA device is available. Pass"
                " enabled=False to silence this warning, or the device of the loss.",
                UserWarning,
                stacklevel=2,
            )
            enabled = False
        return object.__new__(cls if enabled else DisabledGradScaler)  # type: ignore[return-value]

    def __init__(
        self,
        device: str | torch.device | None = None,  # noqa: ARG002 - read in __new__
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's call shape
        *,
        backoff_interval: int = 1,
        consecutive_backoff: bool = True,
        min_scale: float = 2.0**-24,
        max_scale: float = LARGEST,
        dynamic: bool = True,
        warmup_steps: int = 0,
        num_losses: int = 1,
        collapse_patience: int = 50,
        on_collapse: str | OnCollapse = OnCollapse.WARN,
        reduce_found_inf: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        if not enabled and not isinstance(self, DisabledGradScaler):
            raise ScalerError(
                f"{type(self).__name__} passed enabled=False to GradScaler.__init__, but was itself"
                " constructed without it. Give its constructor a keyword argument `enabled`."
            )
        rule = ScaleRule(
            growth_factor,
            backoff_factor,
            growth_interval,
            backoff_interval,
            consecutive_backoff,
            min_scale,
            max_scale,
            dynamic,
            warmup_steps,
        )
        self._initialize(
            rule,
            first_states(rule, init_scale, num_losses),
            _Settings(collapse_patience, OnCollapse.parse(on_collapse), reduce_found_inf),
        )

    def _initialize(self, rule: ScaleRule, states: list[ScaleState], settings: _Settings) -> None:
        self._settings = settings
        self._scales = LossScales(
            rule,
            states,
            [CollapseMonitor(settings.collapse_patience, settings.on_collapse) for _ in states],
        )
        self._schedules = Schedules()
        self._records = OptimizerRecords(self._scales, self._schedules, settings.reduce_found_inf)

    # -- scaling -----------------------------------------------------------------------------------

    def scale(self, outputs: Any, loss_id: int = 0) -> Any:
        """Multiply a loss, or losses in a nested iterable, by the scale of `loss_id`.

        Does not synchronize. Containers keep their type.
        """
        return self._scaled(outputs, loss_id)

    def _scaled(self, outputs: Any, loss_id: int) -> Any:
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale_for(outputs, loss_id)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes | Mapping):
            # Not `self.scale`, which a subclass may override with other arguments.
            scaled = (self._scaled(output, loss_id) for output in outputs)
            if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
                return type(outputs)(*scaled)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError(
            f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}. Pass"
            " the loss itself."
        )

    def backward(
        self,
        loss: torch.Tensor,
        *,
        loss_id: int = 0,
        optimizers: Optimizer | Sequence[Optimizer],
        **kwargs: Any,
    ) -> None:
        """Run backward of one of several losses, unscale its gradients and add them to the others.

        Each loss has its own scale, so its gradients are unscaled at once. They go to the
        parameters of `optimizers` only: other tensors would sum gradients of different scales.
        Further arguments are those of `Tensor.backward`.
        """
        chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in chosen:
            self._records.check_stage(
                self._records.of(optimizer), (OptimizerStage.STEPPED,), "backward()"
            )
        with backward_isolated(self.scale(loss, loss_id), chosen, **kwargs):
            for optimizer in chosen:
                self._records.unscale(optimizer, self._records.of(optimizer), loss_id)

    def find_scale(
        self,
        loss: torch.Tensor,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        loss_id: int = 0,
    ) -> float:
        """Lower the initial scale until the gradients of a loss are finite; return the scale.

        Call it once, at the first iteration, before `scale(loss).backward()`: no batch is lost to a
        scale that is too high. Runs backward several times with `retain_graph=True` and leaves no
        gradients; a found scale is divided by 4, since later gradients may be larger. `TrainStep`
        does this itself. Synchronizes.

        The scale stays as it is if it is not dynamic or was used before, if the loss or its
        gradients are non-finite at every scale, and in a process group: gradients of a second
        backward are not reduced over processes.

        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.find_scale(1e35 * model(torch.ones(1, 2)).sum(), optimizer)
        256.0
        """
        chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        parameters = [
            parameter for optimizer in chosen for parameter in gradients.parameters(optimizer)
        ]
        if any(parameter.grad is not None for parameter in parameters):
            raise ScalerError(
                "find_scale() computes gradients and drops them, and there are gradients already."
                " Call it before backward(), after optimizer.zero_grad()."
            )
        self._scale_for(loss, loss_id)
        if scale_search.can_search(self._scales, loss_id, parameters) and bool(
            loss.isfinite().all()
        ):
            scale_search.search(
                self._scales,
                loss_id,
                parameters,
                lambda _: self._scaled(loss, loss_id).backward(retain_graph=True),
            )
            for parameter in parameters:
                parameter.grad = None
        return self._scales.state(loss_id).scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale in place, and check them.

        Call it before reading or clipping gradients, once per step. Does not synchronize.
        """
        self._scales.require("unscale_()")
        record = self._records.of(optimizer)
        self._records.check_stage(
            record, (OptimizerStage.UNSCALED, OptimizerStage.STEPPED), "unscale_()"
        )
        self._records.check_one_scale("unscale_()")
        self._records.unscale(optimizer, record, 0)

    # -- stepping ----------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer, *args: Any, scheduler: LRScheduler | None = None, **kwargs: Any
    ) -> StepResult:
        """Step an optimizer, or skip the step if a gradient is not finite.

        Unscales the gradients first, unless `unscale_()` or `backward()` did. A fused optimizer
        skips on the device and nothing synchronizes; for others one flag is read per step.

        A scheduler that is passed advances with successful steps only. It must be one of torch's
        whose future values can be computed, so not a `ReduceLROnPlateau`. If the step is skipped on
        the device, scheduler and optimizer are brought up to date when `optimizer.param_groups`, a
        state dict or `get_last_lr()` is read, which synchronizes once; a group that was kept from
        an earlier read shows an old rate. Other arguments are passed to the optimizer's step.
        """
        if args or kwargs:
            optimizer_step.refuse_closures(args, kwargs)
        if scheduler is not None:
            self._schedules.accept(optimizer, scheduler)
        self._scales.require("step()")
        record = self._records.of(optimizer)
        if record.stage is OptimizerStage.STEPPED:
            self._records.check_stage(record, (OptimizerStage.STEPPED,), "step()")
        if not optimizer_step.skips_on_device(optimizer):
            step = self._records.step_or_skip
        elif optimizer_step.takes_grad_scaler(optimizer):
            step, kwargs = self._records.step_with_scaler, {**kwargs, "grad_scaler": self}
        else:
            step = self._records.step_with_flag
        result = step(optimizer, record, scheduler, args, kwargs)
        record.enter(OptimizerStage.STEPPED)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the steps since the last update. Does not synchronize.

        `new_scale` sets the scale instead, clamped to `min_scale` and `max_scale`.
        """
        self._scales.require("update()")
        if new_scale is not None:
            self._scales.set(new_scale)
        else:
            self._records.advance_scales()
        self._records.clear()

    # -- state -------------------------------------------------------------------------------------

    def register_parameter_names(self, model: nn.Module) -> None:
        """Use the names of a model's parameters in `first_nonfinite` and in warnings.

        Without it, the names are those of the optimizer, or positions. Does not keep the model
        alive.
        """
        self._records.names.register(model)

    def state(self, loss_id: int = 0) -> ScaleState:
        """Return the scale of a loss and its counters. This synchronizes.

        Schedulers that were passed to `step` are brought up to date.
        """
        self._schedules.reconcile()
        return self._scales.state(loss_id)

    def get_scale(self) -> float:
        """Return the scale of the first loss. This synchronizes."""
        return self.state().scale

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return True

    # -- state dict and pickle ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its counters and the rule. This synchronizes.

        torch's scaler can load it: it has torch's five entries, and more under keys that torch
        ignores.
        """
        self._schedules.reconcile()
        return scale_state.scaler_to_dict(self._scales.states(), self._scales.rule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of mezzo's or torch's scaler.

        Raises `ScalerError` and changes nothing if it is invalid, for example if its scale is not
        positive and finite.
        """
        self._scales.load(
            *scale_state.scaler_from_dict(state_dict, self._scales.rule, len(self._scales))
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._records.by_id:
            raise ScalerError(
                "A scaler can be pickled only between iterations, since flags on a device cannot be"
                " saved. Call update() first."
            )
        return {
            "rule": self._scales.rule,
            "states": self._scales.states(),
            "settings": self._settings,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._initialize(**state)

    # -- private -----------------------------------------------------------------------------------

    def _scale_for(self, output: torch.Tensor, loss_id: int) -> torch.Tensor:
        scales = self._scales.scales
        scale = scales[loss_id] if 0 <= loss_id < len(scales) else None
        if scale is None:
            scale = self._scales.make(output.device, loss_id)
            if self._warns_if_not_needed:
                warn_if_not_needed(output)
        return (
            scale.scale
            if scale.scale.device == output.device
            else scale.scale.to(output.device, non_blocking=output.device.type != "cpu")
        )


class DisabledGradScaler(GradScaler):
    """A scaler that does nothing: losses are not scaled, and steps are never skipped.

    `GradScaler(enabled=False)` returns one.
    """

    def scale(self, outputs: Any, loss_id: int = 0) -> Any:  # noqa: ARG002
        """Return the outputs unchanged."""
        return outputs

    def backward(
        self,
        loss: torch.Tensor,
        *,
        loss_id: int = 0,  # noqa: ARG002
        optimizers: Optimizer | Sequence[Optimizer] = (),
        **kwargs: Any,
    ) -> None:
        """Run backward, for the parameters of `optimizers` only if any are passed."""
        chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not chosen:
            loss.backward(**kwargs)
            return
        with backward_isolated(loss, chosen, **kwargs):
            pass

    def find_scale(
        self,
        loss: torch.Tensor,  # noqa: ARG002
        optimizers: Optimizer | Sequence[Optimizer],  # noqa: ARG002
        *,
        loss_id: int = 0,  # noqa: ARG002
    ) -> float:
        """Return 1."""
        return 1.0

    def unscale_(self, optimizer: Optimizer) -> None:
        """Do nothing: the gradients are not scaled."""

    def step(
        self, optimizer: Optimizer, *args: Any, scheduler: LRScheduler | None = None, **kwargs: Any
    ) -> StepResult:
        """Step the optimizer, with a closure too, and the scheduler."""
        if scheduler is not None:
            self._schedules.accept(optimizer, scheduler)
        value = optimizer.step(*args, **kwargs)
        if scheduler is not None:
            advance_scheduler(optimizer, scheduler)
        return StepResult.known(value, skipped=False)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Do nothing: there is no scale."""

    def get_scale(self) -> float:
        """Return 1."""
        return 1.0

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary, as torch does."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: there is no state."""
