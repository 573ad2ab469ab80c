"""Check the gradients of optimizers, then step or skip, between two updates of the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError
from mezzo.scaling import gradients, optimizer_step
from mezzo.scaling.gradient_counts import GradientCounts
from mezzo.scaling.loss_scales import (
    LossScales,
    OptimizerRecord,
    binding_of,
    combine,
    common_device,
    share_flags,
)
from mezzo.scaling.mesh import ProcessMesh, mesh_of
from mezzo.scaling.scale_state import OptimizerStage
from mezzo.scaling.scale_tensors import HostLossScale
from mezzo.scaling.scaler_schedules import Schedules, advance_scheduler
from mezzo.scaling.step_result import (
    NO_SOURCE,
    FlaggedSource,
    KnownSource,
    NonfiniteSource,
    ParameterNames,
    StepResult,
)

Optimizer = torch.optim.Optimizer


class OptimizerRecords:
    """A record of each optimizer since the last update: checked, stepped or skipped."""

    def __init__(
        self,
        scales: LossScales,
        schedules: Schedules,
        reduce_found_inf: Callable[[torch.Tensor], object] | None,
    ) -> None:
        self._scales, self._schedules = scales, schedules
        self._reduce_found_inf = reduce_found_inf
        self._checker = gradients.CpuGradientChecker()
        self.names = ParameterNames()
        """Names of parameters in messages."""
        self.by_id: dict[int, OptimizerRecord] = {}
        """The records, by `id(optimizer)`."""
        self.counts: GradientCounts | None = None
        """Where checks count the values of gradients; None if they do not."""
        self.revision = 0
        """Changes with `counts`."""

    def of(self, optimizer: Optimizer) -> OptimizerRecord:
        """Return the record of an optimizer since the last update."""
        record = self.by_id.get(id(optimizer))
        if record is None:
            record = self.by_id[id(optimizer)] = OptimizerRecord(optimizer=optimizer)
        return record

    def clear(self) -> None:
        """Discard all records, after an update."""
        self._checker.recycle_flags()
        self.by_id.clear()

    def count_gradients(self, counts: GradientCounts | None) -> None:
        """Start or stop counting the values of gradients in every check."""
        self.counts = counts
        self.revision += 1

    # -- order of calls ----------------------------------------------------------------------------

    def check_stage(
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

    def check_one_scale(self, call: str) -> None:
        """Raise `ScalerError` if there are several losses, whose scales differ."""
        if len(self._scales) > 1:
            raise ScalerError(
                f"{call} cannot choose among the {len(self._scales)} scales of this scaler. With"
                " several losses call scaler.backward(loss, loss_id=..., optimizers=...), which"
                " unscales their gradients, instead of scaler.scale(loss).backward()."
            )

    # -- gradients ---------------------------------------------------------------------------------

    def unscale(self, optimizer: Optimizer, record: OptimizerRecord, loss_id: int) -> None:
        """Divide the gradients of an optimizer by the scale of a loss, and check them."""
        self.check(optimizer, record, loss_id, self._scales.of(loss_id).inverse())
        record.enter(OptimizerStage.UNSCALED)

    def check(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        loss_id: int,
        factor: torch.Tensor | None,
    ) -> None:
        """Check the gradients of an optimizer; multiply them by a factor if one is passed.

        If its parameters are sharded, the flags hold for all processes of their mesh.
        """
        flags = record.flags(loss_id)
        scale = self._scales.of(loss_id)
        binding = binding_of(optimizer)
        mesh = mesh_of(gradients.parameters(optimizer)) if binding is None else binding.mesh
        if factor is not None:
            for bound in optimizer_step.bindings_of(optimizer):
                bound.widen_gradients()
        if factor is not None and mesh is None and isinstance(scale, HostLossScale):
            if self.counts is not None:
                gradients.count(optimizer, self.counts)
            found_nonfinite = self._checker.check(optimizer, factor, flags)
            record.known.append(found_nonfinite)
            if found_nonfinite:
                record.name_source(self._nonfinite_source(optimizer, record))
        else:
            self._check_on_device(optimizer, record, flags, factor, scale.scale, mesh)
        if self._reduce_found_inf is not None:
            self._reduce(self._reduce_found_inf, record, flags, scale.scale.device)

    def _check_on_device(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        flags: gradients.Flags,
        factor: torch.Tensor | None,
        scale: torch.Tensor,
        mesh: ProcessMesh | None,
    ) -> None:
        binding = binding_of(optimizer)
        source = record.add_flagged(FlaggedSource(self.names, optimizer, self.counts))
        if binding is None or factor is not None or not binding.check(scale, flags, source):
            gradients.check_sorted(optimizer, factor, flags, source, mesh=mesh)
            # Without any gradient, step() raises on every process.
            if mesh is not None and flags:
                share_flags(mesh, flags)

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
        return KnownSource(self.names.name_of(first, optimizer))

    # -- steps -------------------------------------------------------------------------------------

    def step_or_skip(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        scheduler: LRScheduler | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult:
        """Step an optimizer, or skip the step, as the host decides."""
        if record.stage is OptimizerStage.READY:
            self.check_one_scale("step()")
            self.unscale(optimizer, record, 0)
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
            advance_scheduler(optimizer, scheduler)
        return StepResult.known(value, skipped=False)

    def step_with_flag(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        scheduler: LRScheduler | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult:
        """Step an optimizer that reads the scale and the flag itself, and skips by itself."""
        unscaled = record.stage is OptimizerStage.UNSCALED
        if not unscaled:
            self.check_one_scale("step()")
            self.check(optimizer, record, 0, None)
        scale = next(scale for scale in self._scales.scales if scale is not None).scale
        found_inf = combine(self._require_flags(record), scale.device)
        with optimizer_step.amp_attributes(optimizer, scale, found_inf, unscaled=unscaled):
            if scheduler is None:
                return StepResult(optimizer.step(*args, **kwargs), found_inf, record.source)
            with self._schedules.values_applied(optimizer, scheduler, found_inf):
                return StepResult(optimizer.step(*args, **kwargs), found_inf, record.source)

    def step_with_scaler(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        scheduler: LRScheduler | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StepResult:
        """Step an optimizer that gets the scaler, in the deprecated form of torch's protocol."""
        value = optimizer.step(*args, **kwargs)
        # Checking the gradients is left to the optimizer.
        flags = record.all_flags()
        found_inf = combine(flags, common_device(flags)) if flags else None
        if scheduler is not None and (found_inf is None or not bool(found_inf)):
            advance_scheduler(optimizer, scheduler)
        return StepResult(value, found_inf, record.source)

    def _require_flags(self, record: OptimizerRecord) -> list[torch.Tensor]:
        flags = record.all_flags()
        if not flags:
            raise ScalerError(
                "step() found no gradients: no parameter of this optimizer has one. Call"
                " scaler.scale(loss).backward() first, with a loss that reaches them. If the model"
                " was sharded after the optimizer was created, the optimizer's parameters are no"
                " longer the model's: first fully_shard(model), then create the optimizer."
            )
        return flags

    # -- update ------------------------------------------------------------------------------------

    def advance_scales(self) -> None:
        """Adapt the scale of each loss to the flags of its gradients."""
        recorded = False
        for loss_id in range(len(self._scales)):
            flags: list[torch.Tensor] = []
            source: NonfiniteSource = NO_SOURCE
            for record in self.by_id.values():
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
