"""`mezzo.GradScaler`: torch's scaler without its waits and without its collapse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError
from mezzo.scaling import gradients, optimizer_step, scale_state
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

_ENABLED_PLACE = 5
"""Where `enabled` stands among torch's positional arguments."""


@dataclass(frozen=True)
class _Settings:
    collapse_patience: int
    on_collapse: OnCollapse
    reduce_found_inf: Callable[[torch.Tensor], object] | None
    """Reduces a flag over a process group in place: its largest value, or its sum."""


class GradScaler(TorchScalerApi):
    """Scales losses so that 16-bit gradients stay representable, skips steps whose gradients are not finite, and adapts the scale.

    torch's constructor and methods, and what torch lacks: a floor, back-off only after several bad
    steps, a scale for each loss, and steps that tell what happened.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu", init_scale=1024.0, min_scale=1.0)
    >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    >>> scaler.step(optimizer).skipped
    False
    >>> scaler.update()
    """

    _advises = True
    """Whether it says that a loss computed in bfloat16 needs no scaling."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A scaler that is not enabled is another object, which does nothing and costs nothing."""
        enabled = kwargs.get(
            "enabled", args[_ENABLED_PLACE] if len(args) > _ENABLED_PLACE else True
        )
        device = args[0] if args else kwargs.get("device")
        if (
            enabled
            and device is not None
            and torch.device(device).type == "cuda"
            and not torch.cuda.is_available()
        ):
            warnings.warn(
                f"GradScaler({str(device)!r}) is enabled, but no CUDA device is available: it is"
                " disabled.",
                UserWarning,
                stacklevel=2,
            )
            enabled = False
        return object.__new__(cls if enabled else DisabledGradScaler)  # type: ignore[return-value]

    def __init__(
        self,
        # A scale is where its loss is; __new__ looks whether there is such a device.
        device: str | torch.device | None = None,  # noqa: ARG002
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
                f"{type(self).__name__} was made without enabled=False, which its base class got."
                " Let its own constructor take `enabled` by keyword."
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
        """Multiply a loss, or losses in a nested iterable, by the scale; `loss_id` chooses among the scales of a scaler with several losses."""
        return self._scaled(outputs, loss_id)

    def _scaled(self, outputs: Any, loss_id: int) -> Any:
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale_for(outputs, loss_id)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes | Mapping):
            # Not by `scale`, which a subclass may have replaced by one that counts its calls.
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
        """Run backward of one of several losses. Each has a scale of its own, so its gradients are unscaled at once and added to what is there already.

        Gradients go to the parameters of `optimizers` and nowhere else: in other tensors, gradients
        of different scales would meet unseen.
        """
        chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in chosen:
            self._refuse(self._record(optimizer), (OptimizerStage.STEPPED,), "backward()")
        with backward_isolated(self.scale(loss, loss_id), chosen, **kwargs) as own:
            for optimizer in own:
                record = self._record(optimizer)
                self._check(optimizer, record, loss_id, self._scales.of(loss_id).inverse())
                record.stage = OptimizerStage.UNSCALED

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale in place, and check them; do this before clipping."""
        self._scales.require("unscale_()")
        record = self._record(optimizer)
        self._refuse(record, (OptimizerStage.UNSCALED, OptimizerStage.STEPPED), "unscale_()")
        self._refuse_mixed_scales("unscale_()")
        self._check(optimizer, record, 0, self._scales.of(0).inverse())
        record.stage = OptimizerStage.UNSCALED

    # -- stepping ----------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer, *args: Any, scheduler: LRScheduler | None = None, **kwargs: Any
    ) -> StepResult:
        """Step an optimizer if its gradients are finite, skip it otherwise, and say which without waiting unless it is asked.

        A scheduler that is passed advances only with a good step, and must be one of torch's whose
        coming values can be computed: not a `ReduceLROnPlateau`. Where only the device knows which
        steps were good, scheduler and optimizer catch up when `optimizer.param_groups`, a state
        dict or `get_last_lr()` is read, which waits for the device once; a group that was kept from
        an earlier read shows an old rate. Other arguments are the optimizer's.
        """
        if args or kwargs:
            optimizer_step.refuse_closures(args, kwargs)
        if scheduler is not None:
            self._schedules.accept(optimizer, scheduler)
        self._scales.require("step()")
        record = self._record(optimizer)
        if record.stage is OptimizerStage.STEPPED:
            self._refuse(record, (OptimizerStage.STEPPED,), "step()")
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
            self._refuse_mixed_scales("step()")
            self._check(optimizer, record, 0, self._scales.of(0).inverse())
            record.stage = OptimizerStage.UNSCALED
        bad = record.found_nonfinite
        # What the host knows already is not asked of the flags again.
        if bad is None:
            flags = self._flags_of(record)
            bad = bool(combine(flags, common_device(flags)))
        if bad:
            return StepResult.known(
                None, skipped=True, culprit=self._nonfinite_source(optimizer, record)
            )
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
        """Let the optimizer skip by itself: it reads the scale and the flag on the device."""
        if optimizer_step.takes_grad_scaler(optimizer):
            value = optimizer.step(*args, **kwargs, grad_scaler=self)  # type: ignore[call-overload]
            # Whether it checked its gradients is its own affair.
            flags = record.all_flags()
            found = combine(flags, common_device(flags)) if flags else None
            if scheduler is not None and (found is None or not bool(found)):
                optimizer_step.advance(optimizer, scheduler)
            return StepResult(value, found, record.source)
        unscaled = record.stage is OptimizerStage.UNSCALED
        if not unscaled:
            self._refuse_mixed_scales("step()")
            self._check(optimizer, record, 0, None)
        scale = next(scale for scale in self._scales.made if scale is not None).scale
        found = combine(self._flags_of(record), scale.device)
        with optimizer_step.scaling_info(optimizer, scale, found, unscaled=unscaled):
            if scheduler is None:
                return StepResult(optimizer.step(*args, **kwargs), found, record.source)
            with self._schedules.applied(optimizer, scheduler, found):
                return StepResult(optimizer.step(*args, **kwargs), found, record.source)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last update found; a given scale is set instead, within the floor and the ceiling."""
        self._scales.require("update()")
        if new_scale is not None:
            self._scales.set(new_scale)
        else:
            self._advance()
        self._checker.unscale()
        self._records.clear()

    def _advance(self) -> None:
        recorded = False
        for index in range(len(self._scales)):
            flags: list[torch.Tensor] = []
            culprit: NonfiniteSource = NO_SOURCE
            for record in self._records.values():
                found = record.found_inf.get(index)
                if found:
                    flags.extend(found.values())
                    if culprit is NO_SOURCE or not culprit.has_candidates():
                        culprit = record.source
            if flags:
                recorded = True
                self._scales.advance(index, flags, culprit)
        if not recorded:
            raise ScalerError(
                "update() found no gradients that were checked since the last one. Call"
                " scaler.step(optimizer) or scaler.unscale_(optimizer) before it, with gradients in"
                " place."
            )

    # -- asking ------------------------------------------------------------------------------------

    def register_parameter_names(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters, so that a skipped step can name the first bad one."""
        self._names.register(model)

    def state(self, loss_id: int = 0) -> ScaleState:
        """The scale of a loss and its counters as a value; this waits for the device. Schedulers that were passed to `step` catch up."""
        self._schedules.reconcile()
        return self._scales.state(loss_id)

    def get_scale(self) -> float:
        """The scale; this waits for the device."""
        return self.state().scale

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return True

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state: torch's five entries, which torch's scaler reads, and mezzo's own beside them."""
        self._schedules.reconcile()
        return scale_state.scaler_to_dict(self._scales.states(), self._scales.rule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, from mezzo's scaler or from torch's. A scale that is not a positive finite number is refused, and nothing is changed."""
        self._scales.load(
            *scale_state.scaler_from_dict(state_dict, self._scales.rule, len(self._scales))
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise ScalerError(
                "A scaler is pickled between iterations only, for flags on a device cannot be"
                " saved. Call update() first."
            )
        return {
            "rule": self._scales.rule,
            "states": self._scales.states(),
            "settings": self._settings,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(**state)

    # -- inside ------------------------------------------------------------------------------------

    def _scale_for(self, output: torch.Tensor, loss_id: int) -> torch.Tensor:
        made = self._scales.made
        scale = made[loss_id] if 0 <= loss_id < len(made) else None
        if scale is None:
            scale = self._scales.make(output.device, loss_id)
            if self._advises:
                warn_if_not_needed(output)
        return (
            scale.scale
            if scale.scale.device == output.device
            else scale.scale.to(output.device, non_blocking=output.device.type != "cpu")
        )

    def _check(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        loss_id: int,
        factor: torch.Tensor | None,
    ) -> None:
        """Check the gradients of an optimizer, and multiply them by a factor if there is one."""
        flags = record.flags(loss_id)
        bound = binding_of(optimizer)
        if factor is not None:
            for one in bindings_of(optimizer):
                one.widen_gradients()
        if factor is not None and isinstance(self._scales.of(loss_id), HostLossScale):
            bad = self._checker.check(optimizer, factor, flags)
            record.known.append(bad)
            if bad:
                record.source = self._nonfinite_source(optimizer, record)
        else:
            culprit = (
                record.source
                if isinstance(record.source, FlaggedSource)
                else FlaggedSource(self._names, optimizer)
            )
            if (
                bound is None
                or factor is not None
                or not bound.check(self._scales.of(loss_id).scale, flags, culprit)
            ):
                gradients.check_sorted(optimizer, factor, flags, culprit)
            record.source = culprit
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
        """One flag for all devices, reduced once; a process without gradients takes part, or the others would wait for it."""
        found = (
            combine(list(flags.values()), common_device(list(flags.values()))).clone()
            if flags
            else torch.zeros((), device=device)
        )
        reduce_found_inf(found)
        record.known.append(None)
        flags.clear()
        flags[found.device] = found.clamp_(max=1.0)

    def _nonfinite_source(self, optimizer: Optimizer, record: OptimizerRecord) -> NonfiniteSource:
        """Who spoiled a step that the host knows to be bad. Noted when the gradients are checked, for clipping spreads a NaN to all of them."""
        if record.source.has_candidates():
            return record.source
        bad = gradients.first_nonfinite(gradients.parameters(optimizer))
        return record.source if bad is None else KnownSource(self._names.name_of(bad, optimizer))

    def _flags_of(self, record: OptimizerRecord) -> list[torch.Tensor]:
        flags = record.all_flags()
        if not flags:
            raise ScalerError(
                "step() found no gradients: no parameter of this optimizer has one. Call"
                " scaler.scale(loss).backward() first, with a loss that reaches them."
            )
        return flags

    def _refuse(
        self, record: OptimizerRecord, stages: tuple[OptimizerStage, ...], call: str
    ) -> None:
        if record.stage in stages:
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

    def _refuse_mixed_scales(self, call: str) -> None:
        if len(self._scales) > 1:
            raise ScalerError(
                f"{call} cannot tell which of {len(self._scales)} scales these gradients have. With"
                " several losses call scaler.backward(loss, loss_id=..., optimizers=...), which"
                " unscales them, instead of scaler.scale(loss).backward()."
            )


class DisabledGradScaler(GradScaler):
    """The scaler that does nothing: losses pass as they are, steps are the optimizer's own."""

    def scale(self, outputs: Any, loss_id: int = 0) -> Any:  # noqa: ARG002
        """The outputs as they are."""
        return outputs

    def backward(
        self,
        loss: torch.Tensor,
        *,
        loss_id: int = 0,  # noqa: ARG002
        optimizers: Optimizer | Sequence[Optimizer] = (),  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Plain backward."""
        loss.backward(**kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Nothing was scaled."""

    def step(
        self, optimizer: Optimizer, *args: Any, scheduler: LRScheduler | None = None, **kwargs: Any
    ) -> StepResult:
        """The optimizer's own step, closures included, and the scheduler's."""
        if scheduler is not None:
            self._schedules.accept(optimizer, scheduler)
        value = optimizer.step(*args, **kwargs)
        if scheduler is not None:
            optimizer_step.advance(optimizer, scheduler)
        return StepResult.known(value, skipped=False)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """There is no scale."""

    def get_scale(self) -> float:
        """One: nothing is scaled."""
        return 1.0

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Empty, as torch's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is no state."""
