"""Fused optimizer step: unscale, clip, update and round in one Triton kernel on CUDA.

A first kernel checks the gradients and computes their norm, a second one updates. Hyper-parameters,
step counts, loss scale, norm and found_inf are read on the device: a step does not synchronize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeGuard

import torch

from mezzo import _launch
from mezzo._errors import UnsupportedError
from mezzo.optim.binding import Optimizer
from mezzo.optim.device_binding import DeviceBinding, write_table
from mezzo.optim.fused_algorithms import ALGORITHMS, Number, algorithm_name
from mezzo.optim.fused_launch import CHUNK, StepInputs, launch_update
from mezzo.optim.fused_tables import LaunchPlan, ParameterSlots, gradients_of, make_launches
from mezzo.optim.master_weights import MasterWeights
from mezzo.scaling import check_unscale
from mezzo.scaling.gradient_counts import CountedGradients
from mezzo.scaling.gradients import Flags, room_for_flags, unit_factor
from mezzo.scaling.gradients import parameters as all_parameters
from mezzo.scaling.loss_scales import share_flags
from mezzo.scaling.mesh import local
from mezzo.scaling.schedule_sync import groups_of
from mezzo.scaling.step_result import FlaggedSource

_GRADIENT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


class FusedBinding(DeviceBinding):
    """A bound optimizer with a fused step on CUDA; elsewhere it runs its original step."""

    device_values = frozenset({"lr", "momentum", "betas"})

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights,
        *,
        clip_norm: float | None = None,
        takes_scale: bool = True,
    ) -> None:
        super().__init__(optimizer, masters, clip_norm=clip_norm, takes_scale=takes_scale)
        self._algorithm = ALGORITHMS[algorithm_name(optimizer)]
        # A decorated model stays on its type of device.
        self._has_kernels = any(
            _launch.has_triton(parameter.device) for parameter in all_parameters(optimizer)
        )
        self._slots = ParameterSlots(optimizer, masters, self._algorithm)
        self._plan: LaunchPlan | None = None
        self._hyper: tuple[Any, torch.Tensor | None] = (None, None)
        """Hyper-parameters of all groups, as numbers on the host and as a table on the device."""
        self._square_sum: torch.Tensor | None = None
        """Sum of squares of all unscaled gradients, float64; None if it is not computed. All
        captured steps write this tensor."""
        self._copied_groups: list[list[Any]] | None = None
        """Values of the groups when hyper-parameters were last copied for a replay; None if the
        table on the device may differ from them."""
        self._last_groups: tuple[list[list[Any]], tuple[Any, ...]] = ([], ())
        """Values of the groups at the last `recapture_key`, and the part of the key they give."""
        self._has_tensors = False
        """Whether hyper-parameters among them are tensors."""
        self._checked: StepGradients | None = None
        """The gradients that `check` has checked for the coming step."""

    def unbind(self) -> None:
        """Restore the original step, and move step counts to where that step expects them."""
        for group in self.optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                for parameter in group["params"]:
                    step = self.optimizer.state.get(parameter, {}).get("step")
                    if isinstance(step, torch.Tensor):
                        self.optimizer.state[parameter]["step"] = step.cpu()
        super().unbind()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients at the last step, unscaled, before clipping.

        None if it is not computed: see `computes_norm`. Computed here from the sum of squares,
        because most steps do not need it.
        """
        return self._norm if self._square_sum is None else self._square_sum.sqrt().float()

    @property
    def square_sum(self) -> torch.Tensor | None:
        """Square of `grad_norm`, float64: the sum of squares of all unscaled gradients."""
        return super().square_sum if self._square_sum is None else self._square_sum

    def check(self, scale: torch.Tensor, flags: Flags, source: FlaggedSource) -> bool:
        """Check the gradients for the scaler, and compute their norm in the same pass.

        Returns False if the kernel cannot take these gradients.
        """
        self._checked = step_gradients = self._current_gradients() if self._has_kernels else None
        if step_gradients is None:
            return super().check(scale, flags, source)
        plan, device = step_gradients.plan, step_gradients.device
        launch_flags = room_for_flags(device, len(plan.parameters), flags).split(
            [launch.count for launch in plan.launches]
        )
        owners = [launch.select(plan.parameters) for launch in plan.launches]
        with _launch.device_guard(device):
            self._square_sum = self._check_and_norm(
                step_gradients,
                scale if self.computes_norm else None,
                flags[device],
                launch_flags,
                list(map(source.counted, owners)),
            )
        if plan.mesh is not None:
            total = share_flags(plan.mesh, flags, self._square_sum)
            self._square_sum = total if self.computes_norm else None
        for flagged, flagged_owners in zip(launch_flags, owners, strict=True):
            source.add(flagged, flagged_owners)
        return True

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Update from gradients that are multiplied by `scale`, unless `found_inf` is set.

        Does not synchronize where the fused kernels run.
        """
        step_gradients, self._checked = self._checked, None
        # The step uses the tables of the check, unless a step hook has replaced a gradient since.
        is_checked = (
            step_gradients is not None and found_inf is not None and step_gradients.is_current()
        )
        if not is_checked:
            step_gradients = self._current_gradients() if self._has_kernels else None
        if step_gradients is None:
            if self._has_kernels and self._is_capturing():
                # The original step would write the numbers of the capture at every replay.
                raise UnsupportedError(
                    f"the fused step of {type(self.optimizer).__name__} cannot update a parameter:"
                    " it needs dense float32 parameters, or 16-bit ones with master weights"
                )
            self._square_sum = self.device_rate = None
            super().step(scale, found_inf)
            return
        plan, device = step_gradients.plan, step_gradients.device
        with _launch.device_guard(device):
            if self.computes_norm and not is_checked:
                self._square_sum = self._check_and_norm(
                    step_gradients,
                    unit_factor(device) if scale is None else scale,
                    torch.zeros((), device=device),
                    [None] * len(plan.launches),
                    [None] * len(plan.launches),
                )
                if plan.mesh is not None:
                    self._square_sum = plan.mesh.reduce(self._square_sum, None, device)[0]
            # Not `groups_of`: a step that no schedule has prepared, such as a plain
            # optimizer.step(), needs the current learning rates.
            hyper = self.device_rate = self._hyper_on(device, self.optimizer.param_groups)
            squares = None if self.clip_norm is None else self._square_sum
            inputs = StepInputs(hyper, self._slots.counters, scale, found_inf, squares)
            for launch, addresses in zip(plan.launches, step_gradients.addresses, strict=True):
                launch_update(launch, addresses, inputs, self._algorithm, self.masters)
        # The kernels write past torch's version counters, which autograd and weight caches use.
        torch.autograd.graph.increment_version(plan.parameters)
        if plan.mesh is not None:
            torch.autograd.graph.increment_version([slot.shard for slot in plan.slots])
        plan.note_written(self.masters.mark_written(plan.parameters))

    def _is_capturing(self) -> bool:
        trained = all_parameters(self.optimizer)
        return any(_launch.is_capturing(parameter.device) for parameter in trained)

    # -- capture and replay ------------------------------------------------------------------------

    def recapture_key(self) -> tuple[Any, ...]:
        """Return what a captured step depends on: if it changes, the step is captured again."""
        # If nothing has changed, every value of a group is the same object, which makes comparing
        # fast. The list of parameters is the same object when it grows, so that its length counts,
        # and comparing other lists would compare tensors. Groups may also change places.
        groups = groups_of(self.optimizer)
        sizes = [(id(group["params"]), len(group["params"])) for group in groups]
        values = [
            [*[value for name, value in group.items() if name != "params"], *size]
            for group, size in zip(groups, sizes, strict=True)
        ]
        # Equal tensors may be different ones, and comparing them would synchronize.
        if self._has_tensors or values != self._last_groups[0]:
            tensors = list(map(self._tensor_addresses, groups))
            self._has_tensors = any(tensors)
            variants = map(self._algorithm.variant, groups)
            self._last_groups = (values, tuple(zip(variants, sizes, tensors, strict=True)))
        lacks_states = self._lacks_states(self._plan)
        return id(self.optimizer.state), lacks_states, self.masters.generation, self._last_groups[1]

    def _tensor_addresses(self, group: dict[str, Any]) -> tuple[int, ...]:
        """Return the addresses of hyper-parameters that are tensors: captured copies read them."""
        numbers = self._algorithm.numbers(group)
        return tuple(number.data_ptr() for number in numbers if isinstance(number, torch.Tensor))

    def before_capture(self) -> None:
        """Resync masters; allocate the tables that must not be in the graph's memory pool."""
        super().before_capture()
        if self._plan is not None:
            self._plan.reserve()

    def after_capture(self) -> None:
        """Fill these tables: gradients in the graph's memory have their final addresses now."""
        if self._plan is not None:
            self._plan.fill_captured()

    def captured(self) -> tuple[LaunchPlan | None, Any]:
        """Return the plan of the step that was just captured, and tensors that it reads.

        Both must be kept alive as long as the graph is replayed.
        """
        return self._plan, (self._hyper[1], self._slots.counters)

    def before_replay(self, plan: LaunchPlan) -> None:
        """Copy changed hyper-parameters to the device, and resync masters.

        Call `recapture_key` first, in the same step.
        """
        groups = self._last_groups[0]
        if self._copied_groups is not groups:
            self._hyper_on(self._slots.counters.device, groups_of(self.optimizer))
            # The content of a tensor can change without a change of the group.
            self._copied_groups = None if self._has_tensors else groups
        self._resync_written(plan)

    # -- tables ------------------------------------------------------------------------------------

    def _current_gradients(self) -> StepGradients | None:
        """Return the current gradients with their tables; None if the kernels cannot take them."""
        groups = groups_of(self.optimizer)
        parameters = [
            parameter
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        gradients = gradients_of(parameters, self.mesh)
        if not gradients or not _launch.has_triton(gradients[0].device):
            return None
        variants = tuple([self._algorithm.variant(group) for group in groups])
        plan = self._plan
        if plan is None or not plan.fits(
            parameters, gradients, self.optimizer.state, self.masters.generation, variants
        ):
            # Only here: a plan is for one list of parameters, so that a new one does not fit it.
            self._add_missing_masters(parameters)
            self._plan = plan = self._make_plan(parameters, gradients, variants)
        else:
            self._resync_written(plan)
        return None if plan is None else StepGradients.of(plan, gradients)

    def _make_plan(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        variants: tuple[bool, ...],
    ) -> LaunchPlan | None:
        device = gradients[0].device
        gradients_supported = all(
            gradient.device == device
            and gradient.layout is torch.strided
            and gradient.dtype in _GRADIENT_DTYPES
            for gradient in gradients
        )
        if not gradients_supported or not all(map(self._is_supported, parameters)):
            return None
        slots = self._slots.of(parameters, self.mesh)
        dtypes = [gradient.dtype for gradient in gradients]
        launches = make_launches(slots, dtypes, variants, CHUNK)
        plan = LaunchPlan(
            slots,
            launches,
            self.optimizer.state,
            self.masters.generation,
            variants,
            dtypes,
            self.mesh,
        )
        self._resync_masters(plan)
        return plan

    def _is_supported(self, parameter: torch.Tensor) -> bool:
        has_format = parameter in self.masters or parameter.dtype is torch.float32
        return has_format and _launch.is_dense(local(parameter))

    # -- launches ----------------------------------------------------------------------------------

    def _check_and_norm(
        self,
        step_gradients: StepGradients,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor,
        launch_flags: Sequence[torch.Tensor | None],
        counted: Sequence[CountedGradients | None],
    ) -> torch.Tensor | None:
        """Set flags for non-finite gradients: `found_inf`, and one per parameter of each launch.

        With a scale, return the sum of squares of the unscaled gradients, in float64.
        """
        squares = [
            check_unscale.launch(
                check_unscale.GradientTable(addresses, launch.sizes, launch.chunks),
                launch.gradient_dtype,
                scale,
                found_inf,
                flags,
                CHUNK,
                inverse=scale is not None,
                counted=rows,
            )
            for launch, addresses, flags, rows in zip(
                step_gradients.plan.launches,
                step_gradients.addresses,
                launch_flags,
                counted,
                strict=True,
            )
        ]
        if scale is None:
            return None
        if step_gradients.plan.mesh is not None:
            # The part of this process, to be added up over the mesh.
            weighted = [
                part.sum(dtype=torch.float64) / launch.copies
                for part, launch in zip(squares, step_gradients.plan.launches, strict=True)
            ]
            return torch.stack(weighted).sum()
        all_squares = squares[0] if len(squares) == 1 else torch.cat(squares)
        if self._square_sum is None or self._square_sum.device != all_squares.device:
            return all_squares.sum(dtype=torch.float64)
        return torch.sum(all_squares, 0, dtype=torch.float64, out=self._square_sum)

    def _hyper_on(self, device: torch.device, groups: list[dict[str, Any]]) -> torch.Tensor:
        """Return the hyper-parameters of all groups, float64 [8, groups].

        Copied only when one has changed; `group["lr"]` stays a float.
        """
        values = [(*self._algorithm.numbers(group), self.clip_norm or 0.0) for group in groups]
        numbers = tuple(
            tuple(0.0 if _is_on_device(value) else float(value) for value in group)
            for group in values
        )
        last_numbers, hyper = self._hyper
        # A captured copy would write the values of the capture at every replay: `before_replay`
        # copies what has changed.
        if hyper is None or (last_numbers != numbers and not _launch.is_capturing(device)):
            table = torch.tensor(numbers, dtype=torch.float64).T.contiguous()
            hyper = write_table(hyper, device, table)
            self._hyper, self._copied_groups = (numbers, hyper), None
        for column, group in enumerate(values):
            for row, value in enumerate(group):
                if _is_on_device(value):
                    hyper[row, column].copy_(value, non_blocking=True)
        return hyper


def _is_on_device(value: Number) -> TypeGuard[torch.Tensor]:
    """Return whether a hyper-parameter is a tensor that the host cannot read at once.

    One on the host is a number: torch refuses to capture copies of memory that is not pinned.
    """
    return isinstance(value, torch.Tensor) and _launch.needs_sync(value.device)


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step, with tables of their addresses."""

    plan: LaunchPlan
    gradients: list[torch.Tensor]
    """The gradients, with the strides of their parameters."""
    addresses: list[torch.Tensor]
    """One table for each launch."""

    @classmethod
    def of(cls, plan: LaunchPlan, gradients: list[torch.Tensor]) -> StepGradients:
        """Give gradients the strides of their parameters, and make their tables."""
        gradients = plan.lay_out(gradients)
        return cls(plan, gradients, plan.gradients_on(gradients[0].device, gradients))

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self.gradients[0].device

    def is_current(self) -> bool:
        """Return whether the parameters still have these gradients: a step hook may replace one."""
        now = gradients_of(self.plan.parameters, self.plan.mesh)
        return all(map(is_, now, self.gradients))
