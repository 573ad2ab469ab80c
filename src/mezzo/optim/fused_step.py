"""The fused step: one pass over gradients, weights and states that unscales, clips, updates and rounds, after one over the gradients that checks and adds up.

Hyper-parameters, step counts, scale, norm and skip are read on the device: the host waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, is_
from types import SimpleNamespace
from typing import Any

import torch

from mezzo import _launch
from mezzo.optim.binding import Optimizer, OptimizerBinding
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.optim.fused_tables import Launch, LaunchPlan, ParameterSlots, make_launches
from mezzo.optim.master_weights import SAMPLES, VERSION, MasterWeights
from mezzo.scaling import check_unscale
from mezzo.scaling.gradients import Flags, room_for_flags, unit_factor
from mezzo.scaling.schedule_sync import groups_of
from mezzo.scaling.step_result import FlaggedSource

BLOCK = 512
"""Elements that a program updates at a time. A billion parameters of AdamW take 7.1, 7.1 and 7.7
ms with 512, 1024 and 2048 on an H200, where a copy of as many bytes takes 7.4."""
CHUNK = 4 * BLOCK
"""Elements that a program updates, block after block: what it must look up first is looked up
once. One block a program takes 9.7 ms."""
_LANES = 128
_GRADIENT = attrgetter("grad")
_GRADIENTS = frozenset({torch.float16, torch.bfloat16, torch.float32})


class FusedBinding(OptimizerBinding):
    """A bound optimizer that Triton steps on CUDA, and its own step everywhere else."""

    reads_on_device = True

    def __init__(
        self, optimizer: Optimizer, masters: MasterWeights, *, clip_norm: float | None = None
    ) -> None:
        super().__init__(optimizer, masters, clip_norm=clip_norm)
        self._algorithm = ALGORITHMS[algorithm_name(optimizer)]
        self._slots = ParameterSlots(optimizer, masters, self._algorithm)
        self._prepared: LaunchPlan | None = None
        self._hyper: tuple[Any, torch.Tensor | None] = (None, None)
        self._summed: torch.Tensor | None = None
        """The sum of squares of all gradients, unscaled, float64; only with `clip_norm`."""
        self._told: list[list[Any]] | None = None
        """What the groups held when a replayed step was last prepared for; None where the device
        may have been told something else since."""
        self._seen: tuple[list[list[Any]], tuple[tuple[bool, int], ...]] = ([], ())
        self._gathered: GradientBatch | None = None

    def unbind(self) -> None:
        """As `Bound`; counters go back to where the optimizer's own step wants them."""
        for group in self.optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                for parameter in group["params"]:
                    step = self.optimizer.state.get(parameter, {}).get("step")
                    if isinstance(step, torch.Tensor):
                        self.optimizer.state[parameter]["step"] = step.cpu()
        super().unbind()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """As `Bound`; computed for whoever asks, since most steps are not asked."""
        return self._norm if self._summed is None else self._summed.sqrt().float()

    def check(self, scale: torch.Tensor, flags: Flags, source: FlaggedSource) -> bool:
        """The scaler's check over this step's own tables, with the norm in the same pass where one is wanted; false where there is no kernel for it."""
        self._gathered = gathered = self._gather()
        if gathered is None:
            return False
        prepared, device = gathered.prepared, gathered.device
        single = room_for_flags(device, len(prepared.parameters), flags).split(
            [launch.count for launch in prepared.launches]
        )
        with _launch.device_guard(device):
            self._summed = self._check_and_norm(
                gathered, None if self.clip_norm is None else scale, flags[device], single
            )
        for launch, raised in zip(prepared.launches, single, strict=True):
            source.add(raised, launch.chosen(prepared.parameters))
        return True

    def step(self, scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Update from gradients that are `scale` times too large, unless `found` says that they are not finite."""
        gathered, self._gathered = self._gathered, None
        # The check and the step read one table of one set of gradients, unless a hook between them
        # replaced a gradient.
        checked = gathered is not None and found is not None and gathered.stands()
        if not checked:
            gathered = self._gather()
        if gathered is None:
            self._summed = None
            super().step(scale, found)
            return
        prepared, device = gathered.prepared, gathered.device
        with _launch.device_guard(device):
            if self.clip_norm is not None and not checked:
                unflagged = [None] * len(prepared.launches)
                self._summed = self._check_and_norm(
                    gathered,
                    unit_factor(device) if scale is None else scale,
                    torch.zeros((), device=device),
                    unflagged,
                )
            # Not by `groups_of`: a step that no schedule has prepared, such as a plain
            # optimizer.step(), needs the rates of today.
            hyper = self._hyper_on(device, self.optimizer.param_groups)
            for launch, addresses in zip(prepared.launches, gathered.addresses, strict=True):
                self._run(launch, addresses, hyper, scale, found)
        # torch's caches of weights and autograd see what torch's ops write; of this they are told.
        torch.autograd.graph.increment_version(prepared.parameters)
        prepared.versions = self.masters.noted(prepared.parameters)

    # -- replaying ---------------------------------------------------------------------------------

    def before_replay(self, prepared: LaunchPlan) -> None:
        """What the host does before a captured step runs again: hyper-parameters go to the device, and masters follow parameters that others wrote.

        Whoever calls this has just asked for the `ground`.
        """
        groups = self._seen[0]
        if self._told is not groups:
            self._hyper_on(self._slots.counters.device, groups_of(self.optimizer))
            tensors = any(isinstance(value, torch.Tensor) for group in groups for value in group)
            # What a tensor holds may change unseen.
            self._told = None if tensors else groups
        if list(map(VERSION, prepared.parameters)) != prepared.versions:
            self._resync_masters(prepared)

    def captured(self) -> tuple[LaunchPlan | None, Any]:
        """The tables that a step captured just now reads, and what else must be kept for as long as it is replayed."""
        return self._prepared, (self._hyper[1], self._slots.counters)

    def recapture_key(self) -> tuple[Any, ...]:
        """What a captured step stands on: where this is another, it is captured anew."""
        # Groups are compared as they are: where nothing has changed, every value is the same
        # object. A list of parameters stays that when it grows.
        own = groups_of(self.optimizer)
        groups = [[*group.values(), len(group["params"])] for group in own]
        if groups != self._seen[0]:
            self._seen = (
                groups,
                tuple([(self._algorithm.variant(group), len(group["params"])) for group in own]),
            )
        return id(self.optimizer.state), self.masters.generation, self._seen[1]

    def before_capture(self) -> None:
        """Make room for what a capture must not allocate."""
        if self._prepared is not None:
            self._prepared.reserve()

    def after_capture(self) -> None:
        """Fill it: addresses of gradients in a graph's memory are known by now, and stay."""
        if self._prepared is not None:
            self._prepared.settle()

    # -- gathering ---------------------------------------------------------------------------------

    def _gather(self) -> GradientBatch | None:
        """What to launch for the gradients that are there; None where the kernels cannot take them."""
        groups = groups_of(self.optimizer)
        parameters = [
            parameter
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        gradients = list(map(_GRADIENT, parameters))
        variants = tuple([self._algorithm.variant(group) for group in groups])
        prepared = self._prepared
        if prepared is None or not prepared.fits(
            parameters, gradients, self.optimizer.state, self.masters.generation, variants
        ):
            # Asked only here, for tables fit one list of parameters: who joins it is seen.
            self._admit(parameters)
            self._prepared = prepared = self._prepare(parameters, gradients, variants)
        elif list(map(VERSION, parameters)) != prepared.versions:
            self._resync_masters(prepared)
        return None if prepared is None else GradientBatch.of(prepared, gradients)

    def _prepare(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        variants: tuple[bool, ...],
    ) -> LaunchPlan | None:
        devices = {gradient.device for gradient in gradients}
        if len(devices) != 1 or not _launch.has_triton(next(iter(devices))):
            return None
        plain = (
            gradient.layout is torch.strided and gradient.dtype in _GRADIENTS
            for gradient in gradients
        )
        known = (
            (parameter in self.masters or parameter.dtype is torch.float32)
            and _launch.is_dense(parameter)
            for parameter in parameters
        )
        if not all(plain) or not all(known):
            return None
        slots, dtypes = self._slots.of(parameters), [gradient.dtype for gradient in gradients]
        made = LaunchPlan(
            slots,
            make_launches(slots, dtypes, variants, CHUNK),
            self.optimizer.state,
            self.masters.generation,
            variants,
            dtypes,
        )
        self._resync_masters(made)
        return made

    def _resync_masters(self, prepared: LaunchPlan) -> None:
        """Somebody else wrote a parameter: its master follows."""
        for parameter in prepared.parameters:
            if parameter in self.masters:
                self.masters.settle(parameter)
        prepared.versions = list(map(VERSION, prepared.parameters))

    # -- looking -----------------------------------------------------------------------------------

    def _check_and_norm(
        self,
        gathered: GradientBatch,
        scale: torch.Tensor | None,
        found: torch.Tensor,
        single: Sequence[torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Raise flags where gradients are not finite, those of each launch among them; with a scale, the sum of squares of the unscaled ones too, in float64."""
        squares = [
            check_unscale.launch(
                check_unscale.GradientTable(addresses, launch.sizes, launch.chunks),
                launch.gradient_dtype,
                scale,
                found,
                raised,
                CHUNK,
                inverse=scale is not None,
            )
            for launch, addresses, raised in zip(
                gathered.prepared.launches, gathered.addresses, single, strict=True
            )
        ]
        return (
            None
            if scale is None
            else (squares[0] if len(squares) == 1 else torch.cat(squares)).sum(dtype=torch.float64)
        )

    # -- launching ---------------------------------------------------------------------------------

    def _hyper_on(self, device: torch.device, groups: list[dict[str, Any]]) -> torch.Tensor:
        """The hyper-parameters of every group, float64 [8, groups]; copied when one has changed, so that `group["lr"]` stays a float."""
        numbers = [(*self._algorithm.numbers(group), self.clip_norm or 0.0) for group in groups]
        said = tuple(
            tuple(0.0 if isinstance(number, torch.Tensor) else float(number) for number in group)
            for group in numbers
        )
        held, hyper = self._hyper
        # A captured copy would bring back the values of its own day at every replay:
        # `before_replay` sees to what has changed.
        if hyper is None or (held != said and not _launch.is_capturing(device)):
            hyper = self._written(
                hyper, device, torch.tensor(said, dtype=torch.float64).T.contiguous()
            )
            self._hyper, self._told = (said, hyper), None
        for place, group in enumerate(numbers):
            for row, number in enumerate(group):
                if isinstance(number, torch.Tensor):
                    hyper[row, place].copy_(number, non_blocking=True)
        return hyper

    def _written(
        self, hyper: torch.Tensor | None, device: torch.device, table: torch.Tensor
    ) -> torch.Tensor:
        """A table on the device, in the place of the old one where it fits: captured steps read it there."""
        if hyper is None or hyper.shape != table.shape or hyper.device != device:
            return _launch.table_on(device, table)
        return hyper.copy_(_launch.pinned_for(device, table), non_blocking=True)

    def _run(
        self,
        launch: Launch,
        gradients: torch.Tensor,
        hyper: torch.Tensor,
        scale: torch.Tensor | None,
        found: torch.Tensor | None,
    ) -> None:
        own, device, count, counters = _own(), gradients.device, launch.count, self._slots.counters
        squares = None if self.clip_norm is None else self._summed
        # Stands where a kernel does not look.
        nothing = launch.coefficients
        flag = nothing if found is None else found
        code = getattr(own.coefficients, self._algorithm.code).value
        sampled = self.masters.kind.sampled and launch.parameter_dtype is not torch.float32
        told = (
            hyper,
            nothing if scale is None else scale,
            flag,
            nothing if squares is None else squares,
        )
        _launch.run_kernel(
            own.coefficients.prepare_kernel,
            # A program for the sample of each parameter follows.
            -(-count // _LANES) + (count if sampled else 0),
            (
                launch.coefficients,
                counters,
                launch.places,
                *told,
                launch.addresses,
                count,
                hyper.shape[1],
                counters.shape[1],
            ),
            (
                code,
                scale is not None,
                found is not None,
                squares is not None,
                sampled,
                _LANES,
                SAMPLES,
            ),
            device,
        )
        programs = launch.chunks.shape[1]
        if programs == 0:
            return
        numbers = (
            launch.addresses,
            gradients,
            launch.chunks,
            launch.coefficients,
            launch.places,
            flag,
            _seed(self.masters.seed, device),
        )
        kind = (
            own.update_kernels.PLAIN
            if launch.parameter_dtype is torch.float32
            else getattr(own.update_kernels, self.masters.kind.master.name)
        )
        constants = (
            kind.value,
            launch.parameter_dtype is torch.bfloat16,
            _launch.triton_dtype(launch.gradient_dtype),
            found is not None,
            CHUNK,
        )
        if self._algorithm.code == "LAMB":
            self._run_lamb(launch, numbers, constants)
        else:
            _launch.run_kernel(
                own.update_kernels.update_kernel,
                programs,
                (*numbers, count),
                (code, launch.variant, *constants, BLOCK),
                device,
            )

    def _run_lamb(
        self, launch: Launch, numbers: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        own, device, count, programs = (
            _own().lamb_kernels,
            launch.addresses.device,
            launch.count,
            launch.chunks.shape[1],
        )
        partials = torch.zeros(2, programs, dtype=torch.float32, device=device)
        _launch.run_kernel(
            own.lamb_kernel, programs, (*numbers, partials, count), (*constants, False), device
        )
        _launch.run_kernel(
            own.trust_kernel,
            count,
            (launch.addresses, launch.coefficients, partials, count, programs),
            (CHUNK, 1024),
            device,
        )
        _launch.run_kernel(
            own.lamb_kernel, programs, (*numbers, partials, count), (*constants, True), device
        )


@dataclass(frozen=True)
class GradientBatch:
    """The gradients of a step, where the kernels find them."""

    prepared: LaunchPlan
    gradients: list[torch.Tensor]
    """The gradients themselves, with the strides of their parameters."""
    addresses: list[torch.Tensor]
    """A table for each launch."""

    @classmethod
    def of(cls, prepared: LaunchPlan, gradients: list[torch.Tensor]) -> GradientBatch:
        """Lay gradients out."""
        gradients = prepared.lay_out(gradients)
        return cls(prepared, gradients, prepared.gradients_on(gradients[0].device, gradients))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.gradients[0].device

    def stands(self) -> bool:
        """Whether these are still the gradients: a step hook may have replaced one since the check."""
        return all(map(is_, map(_GRADIENT, self.prepared.parameters), self.gradients))


@cache
def _seed(seed: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([seed], dtype=torch.int64, device=device)


@cache
def _own() -> SimpleNamespace:
    # Triton is optional, and takes a while to import.
    from mezzo.optim import triton_coefficients, triton_lamb, triton_update  # noqa: PLC0415

    return SimpleNamespace(
        coefficients=triton_coefficients, lamb_kernels=triton_lamb, update_kernels=triton_update
    )
