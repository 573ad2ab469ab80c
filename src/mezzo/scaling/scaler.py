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
from mezzo.scaling.loss_scales import (
    LossScales,
    OptimizerRecord,
    binding_of,
    combine,
    common_device,
    first_states,
)
from mezzo.scaling.optimizer_step import bindings_of
from mezzo.scaling.scale_state import LARGEST, OnCollapse, OptimizerStage, ScaleRule, ScaleState
from mezzo.scaling.scale_tensors import HostLossScale
from mezzo.scaling.step_result import (
    NO_SOURCE,
    FlaggedSource,
    KnownSource,
    NonfiniteSource,
    ParameterNames,
    StepResult,
)
from mezzo.scaling.torch_scaler_api import TorchScalerApi

Optimizer = torch.optim.Optimizer

_ENABLED_POSITION = 5
"""Position of `enabled` among torch's arguments."""


@dataclass(frozen=True)
class _Settings:
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

    _advises = True
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
        self._start(
            rule,
            first_states(rule, init_scale, num_losses),
            _Settings(collapse_patience, OnCollapse.parse(on_collapse), reduce_found_inf),
        )

    def _start(self, rule: ScaleRule, states: list[ScaleState], settings: _Settings) -> None:
        self._settings = settings
        self._scales = LossScales(
            rule,
            states,
            [CollapseMonitor(settings.collapse_patience, settings.on_collapse) for _ in states],
        )
        self._records: dict[int, OptimizerRecord] = {}
        self._names = ParameterNames()
        self._checker = gradients.CpuGradientChecker()
        self._schedules = optimizer_step.Schedules()

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
            self._check_stage(self._record(optimizer), (OptimizerStage.STEPPED,), "backward()")
        with backward_isolated(self.scale(loss, loss_id), chosen, **kwargs):
            for optimizer in chosen:
                record = self._record(optimizer)
                self._check(optimizer, record, loss_id, self._scales.of(loss_id).inverse())
                record.stage = OptimizerStage.UNSCALED

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
        parameters = [one for optimizer in chosen for one in gradients.parameters(optimizer)]
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
        record = self._record(optimizer)
        self._check_stage(record, (OptimizerStage.UNSCALED, OptimizerStage.STEPPED), "unscale_()")
        self._check_one_scale("unscale_()")
        self._check(optimizer, record, 0, self._scales.of(0).inverse())
        record.stage = OptimizerStage.UNSCALED

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
        record = self._record(optimizer)
        if record.stage is OptimizerStage.STEPPED:
            self._check_stage(record, (OptimizerStage.STEPPED,), "step()")
        if optimizer_step.skips_on_device(optimizer):
            result = self._step_fused(optimizer, record, scheduler, args, kwargs)
        else:
            result = self._step(optimizer, record, scheduler, args, kwargs)
        record.stage = OptimizerStage.STEPPED
        return result

    def _step(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        scheduler: LRScheduler | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult:
        if record.stage is OptimizerStage.READY:
            self._check_one_scale("step()")
            self._check(optimizer, record, 0, self._scales.of(0).inverse())
            record.stage = OptimizerStage.UNSCALED
        found_nonfinite = record.found_nonfinite
        # Read the flags only if the outcome is not known on the host.
        if found_nonfinite is None:
            flags = self._require_flags(record)
            found_nonfinite = bool(combine(flags, common_device(flags)))
        if found_nonfinite:
            source = self._nonfinite_source(optimizer, record)
            return StepResult.known(None, skipped=True, source=source)
        value = optimizer.step(*args, **kwargs)
        if scheduler is not None:
            optimizer_step.advance(optimizer, scheduler)
        return StepResult.known(value, skipped=False)

    def _step_fused(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        scheduler: LRScheduler | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult:
        """Step an optimizer that reads the scale and the flag on the device, and skips there."""
        if optimizer_step.takes_grad_scaler(optimizer):
            value = optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]
            # The optimizer checks its gradients itself, or does not.
            flags = record.all_flags()
            found_inf = combine(flags, common_device(flags)) if flags else None
            if scheduler is not None and (found_inf is None or not bool(found_inf)):
                optimizer_step.advance(optimizer, scheduler)
            return StepResult(value, found_inf, record.source)
        unscaled = record.stage is OptimizerStage.UNSCALED
        if not unscaled:
            self._check_one_scale("step()")
            self._check(optimizer, record, 0, None)
        scale = next(scale for scale in self._scales.scales if scale is not None).scale
        found_inf = combine(self._require_flags(record), scale.device)
        with optimizer_step.scaling_info(optimizer, scale, found_inf, unscaled=unscaled):
            if scheduler is None:
                return StepResult(optimizer.step(*args, **kwargs), found_inf, record.source)
            with self._schedules.values_applied(optimizer, scheduler, found_inf):
                return StepResult(optimizer.step(*args, **kwargs), found_inf, record.source)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the steps since the last update. Does not synchronize.

        `new_scale` sets the scale instead, clamped to `min_scale` and `max_scale`.
        """
        self._scales.require("update()")
        if new_scale is not None:
            self._scales.set(new_scale)
        else:
            self._advance()
        self._checker.recycle_flags()
        self._records.clear()

    def _advance(self) -> None:
        recorded = False
        for loss_id in range(len(self._scales)):
            flags: list[torch.Tensor] = []
            source: NonfiniteSource = NO_SOURCE
            for record in self._records.values():
                found_inf = record.found_inf.get(loss_id)
                if found_inf:
                    flags.extend(found_inf.values())
                    if source is NO_SOURCE or not source.has_candidates():
                        source = record.source
            if flags:
                recorded = True
                self._scales.advance(loss_id, flags, source)
        if not recorded:
            raise ScalerError(
                "update() found no gradients that were checked since the last update(). Call"
                " scaler.step(optimizer) or scaler.unscale_(optimizer) after backward(), then"
                " update()."
            )

    # -- state -------------------------------------------------------------------------------------

    def register_parameter_names(self, model: nn.Module) -> None:
        """Use the names of a model's parameters in `first_nonfinite` and in warnings.

        Without it, the names are those of the optimizer, or positions. Does not keep the model
        alive.
        """
        self._names.register(model)

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
        if self._records:
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
        self._start(**state)

    # -- private -----------------------------------------------------------------------------------

    def _scale_for(self, output: torch.Tensor, loss_id: int) -> torch.Tensor:
        scales = self._scales.scales
        scale = scales[loss_id] if 0 <= loss_id < len(scales) else None
        if scale is None:
            scale = self._scales.make(output.device, loss_id)
            if self._advises:
                warn_if_not_needed(output)
        return (
            scale.scale
            if scale.scale.device == output.device
            else scale.scale.to(output.device, non_blocking=output.device.type != "cpu")
        )

    def _record(self, optimizer: Optimizer) -> OptimizerRecord:
        """Return the record of an optimizer since the last update."""
        record = self._records.get(id(optimizer))
        if record is None:
            record = self._records[id(optimizer)] = OptimizerRecord()
        return record

    def _check(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        loss_id: int,
        factor: torch.Tensor | None,
    ) -> None:
        """Check the gradients of an optimizer; multiply them by a factor if one is passed."""
        flags = record.flags(loss_id)
        binding = binding_of(optimizer)
        if factor is not None:
            for one in bindings_of(optimizer):
                one.widen_gradients()
        if factor is not None and isinstance(self._scales.of(loss_id), HostLossScale):
            found_nonfinite = self._checker.check(optimizer, factor, flags)
            record.known.append(found_nonfinite)
            if found_nonfinite:
                record.source = self._nonfinite_source(optimizer, record)
        else:
            source = (
                record.source
                if isinstance(record.source, FlaggedSource)
                else FlaggedSource(self._names, optimizer)
            )
            if (
                binding is None
                or factor is not None
                or not binding.check(self._scales.of(loss_id).scale, flags, source)
            ):
                gradients.check_sorted(optimizer, factor, flags, source)
            record.source = source
        if self._settings.reduce_found_inf is not None:
            self._reduce(
                self._settings.reduce_found_inf,
                record,
                flags,
                self._scales.of(loss_id).scale.device,
            )

    def _reduce(
        self,
        reduce_found_inf: Callable[[torch.Tensor], object],
        record: OptimizerRecord,
        flags: gradients.Flags,
        device: torch.device,
    ) -> None:
        """Combine the flags of all devices into one, and reduce it over the process group.

        A process without gradients takes part: the others would block without it.
        """
        found_inf = (
            combine(list(flags.values()), common_device(list(flags.values()))).clone()
            if flags
            else torch.zeros((), device=device)
        )
        reduce_found_inf(found_inf)
        record.known.append(None)
        flags.clear()
        flags[found_inf.device] = found_inf.clamp_(max=1.0)

    def _nonfinite_source(self, optimizer: Optimizer, record: OptimizerRecord) -> NonfiniteSource:
        """Return the source of a non-finite gradient. Called before clipping, which spreads NaN."""
        if record.source.has_candidates():
            return record.source
        first = gradients.first_nonfinite(gradients.parameters(optimizer))
        if first is None:
            return record.source
        return KnownSource(self._names.name_of(first, optimizer))

    def _require_flags(self, record: OptimizerRecord) -> list[torch.Tensor]:
        flags = record.all_flags()
        if not flags:
            raise ScalerError(
                "step() found no gradients: no parameter of this optimizer has one. Call"
                " scaler.scale(loss).backward() first, with a loss that reaches them."
            )
        return flags

    def _check_stage(
        self, record: OptimizerRecord, forbidden: tuple[OptimizerStage, ...], call: str
    ) -> None:
        """Raise `ScalerError` if an optimizer is in a stage in which `call` is not allowed."""
        if record.stage in forbidden:
            done = (
                "step()" if record.stage is OptimizerStage.STEPPED else "unscale_() or backward()"
            )
            remedy = (
                "Call it once, before step()."
                if record.stage is OptimizerStage.UNSCALED
                else "Call update() once at the end of the iteration, then go on."
            )
            raise ScalerError(
                f"{call} was called, but {done} has already been called on this optimizer since the"
                f" last update(). {remedy}"
            )

    def _check_one_scale(self, call: str) -> None:
        """Raise `ScalerError` if there are several losses, whose scales differ."""
        if len(self._scales) > 1:
            raise ScalerError(
                f"{call} cannot choose among the {len(self._scales)} scales of this scaler. With"
                " several losses call scaler.backward(loss, loss_id=..., optimizers=...), which"
                " unscales their gradients, instead of scaler.scale(loss).backward()."
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
        optimizers: Optimizer | Sequence[Optimizer] = (),  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Run backward."""
        loss.backward(**kwargs)

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
            optimizer_step.advance(optimizer, scheduler)
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
