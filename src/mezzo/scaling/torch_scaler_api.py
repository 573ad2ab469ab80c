"""Private attributes and accessors of torch's GradScaler that other code reads and writes."""

from __future__ import annotations

import torch

from mezzo.scaling.gradients import Flags, check_sorted, parameters
from mezzo.scaling.loss_scales import LossScales
from mezzo.scaling.mesh import mesh_of
from mezzo.scaling.optimizer_records import OptimizerRecords

Optimizer = torch.optim.Optimizer


class TorchScalerApi:
    """torch's private names, for optimizers, users and tests that use them.

    With several losses they are those of the first.
    """

    _scales: LossScales
    _records: OptimizerRecords

    def _check_inf_per_device(self, optimizer: Optimizer) -> Flags:
        record = self._records.of(optimizer)
        record.found_inf.pop(0, None)
        self._records.check(optimizer, record, 0, None)
        return record.flags(0)

    def _found_inf_per_device(self, optimizer: Optimizer) -> Flags:
        return self._records.of(optimizer).flags(0)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: ARG002, FBT001 - torch's call shape
    ) -> Flags:
        flags: Flags = {found_inf.device: found_inf}
        check_sorted(optimizer, inv_scale, flags, mesh=mesh_of(parameters(optimizer)))
        return flags

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scales.make(torch.device(dev), 0)

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return self._scales.state(0).growth_tracker

    @property
    def _scale(self) -> torch.Tensor | None:
        scale = self._scales.scales[0]
        return None if scale is None else scale.scale

    @_scale.setter
    def _scale(self, scale: torch.Tensor) -> None:
        self._scales.make(scale.device, 0).set(scale.detach(), self._scales.rule)

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        scale = self._scales.scales[0]
        return None if scale is None else scale.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: torch.Tensor) -> None:
        self._scales.make(tracker.device, 0).growth_tracker.copy_(tracker)

    @property
    def _init_scale(self) -> float:
        return self._scales.initial[0].scale

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        self._scales.change_first(scale=value)

    @property
    def _init_growth_tracker(self) -> int:
        return self._scales.initial[0].growth_tracker

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        self._scales.change_first(growth_tracker=value)

    # -- public accessors of the rule --------------------------------------------------------------

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._scales.rule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows."""
        self._scales.change_rule(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale backs off."""
        return self._scales.rule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off."""
        self._scales.change_rule(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of successful steps in a row before the scale grows."""
        return self._scales.rule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of successful steps in a row before the scale grows."""
        self._scales.change_rule(growth_interval=new_interval)

    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)
