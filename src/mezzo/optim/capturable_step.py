"""Steps through the `capturable` form of torch's optimizers, over master weights, without a kernel.

torch's own arithmetic runs over temporary float32 parameters. Scale, `found_inf` and learning rates
are read on the device, and a skipped step selects the old value of everything it would change. The
parameters are updated in batches, so that temporary memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mezzo import _launch
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import UnsupportedError
from mezzo._torch import foreach_copy_, foreach_norm
from mezzo.optim.binding import Optimizer, Parameter, unscale_factor
from mezzo.optim.companion import KEYS
from mezzo.optim.device_binding import DeviceBinding, write_table
from mezzo.optim.flat_values import FlatValues, SavedTensors, views_like
from mezzo.optim.fused_algorithms import algorithm_name
from mezzo.optim.master_weights import MasterWeights, version_of
from mezzo.scaling.gradients import parameters
from mezzo.scaling.schedule_sync import groups_of

CAPTURABLE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adadelta: ("step",),
    torch.optim.Adamax: ("step",),
    torch.optim.ASGD: (),
    torch.optim.NAdam: ("step", "mu_product"),
    torch.optim.RAdam: ("step",),
    torch.optim.RMSprop: ("step",),
    torch.optim.Rprop: ("step",),
}
"""Optimizers by exact type, since a subclass may override `step`, with the states that torch keeps
on the host unless `capturable` is set."""

BATCH = 2**24
"""Elements that are updated together: about 500 MB of temporary tensors."""

_GRADIENT_DTYPES = frozenset({*HALF_DTYPES, torch.float32})


@dataclass(frozen=True, eq=False)
class Batch:
    """Parameters that are updated together: of one group and dtype, all with masters or without."""

    group: int
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]


@dataclass(eq=False)
class StepPlan:
    """The parameters of a captured step, and their versions after the last update."""

    parameters: list[torch.Tensor]
    versions: list[int]
    states: list[tuple[dict[str, Any], str, torch.Tensor]]
    """Tensors of the optimizer's state, each with its dictionary and its name."""

    def has_states(self, state: Any) -> bool:
        """Return whether an optimizer's state has the tensors that the step updates."""
        return len(state) >= len(self.parameters) and all(
            entries.get(name) is tensor for entries, name, tensor in self.states
        )

    def note_written(self, versions: list[int]) -> None:
        """Note the versions after an update."""
        self.versions = versions


class CapturableBinding(DeviceBinding):
    """A bound optimizer of `CAPTURABLE`; other devices than CUDA run its original step."""

    device_values = frozenset({"lr"})
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    """Devices on which this step runs."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights,
        *,
        clip_norm: float | None = None,
        takes_scale: bool = True,
    ) -> None:
        super().__init__(optimizer, masters, clip_norm=clip_norm, takes_scale=takes_scale)
        self._host_states = CAPTURABLE.get(algorithm_name(optimizer), ())
        self._plan: StepPlan | None = None
        self._rate_numbers: list[float] = []
        self._rates: torch.Tensor | None = None
        """Learning rates of the groups, float32 on the device; 0 for one that is a tensor there."""
        self._last_state: Any = None
        self._state_changes = 0
        """How often `optimizer.state` was replaced, as loading a state dict does."""

    def unbind(self) -> None:
        """Restore the original step, and move step counts to where that step expects them."""
        for group in self.optimizer.param_groups:
            if not group.get("capturable"):
                for parameter in group["params"]:
                    state = self.optimizer.state.get(parameter, {})
                    for name in self._host_states:
                        if isinstance(state.get(name), torch.Tensor):
                            state[name] = state[name].cpu()
        super().unbind()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients at the last step, unscaled and before clipping.

        A copy, because captured steps write the norm to one tensor.
        """
        return None if self._norm is None else self._norm.clone()

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Update from gradients that are multiplied by `scale`, unless `found_inf` is set.

        Does not synchronize, except at the first step of a parameter.
        """
        # First: if a schedule runs on the device, this brings learning rates up to date.
        groups = self.optimizer.param_groups
        self._add_missing_masters(parameters(self.optimizer))
        batches = self._batches(groups)
        if not batches:
            super().step(scale, found_inf)
            return
        updated = [parameter for batch in batches for parameter in batch.parameters]
        device = updated[0].device
        if self._needs_states(updated, device):
            if found_inf is not None and bool(found_inf):
                return
            found_inf = None
        if not _launch.is_capturing(device):
            self._prepare(updated)
        skipped = None if found_inf is None else found_inf.to(device).reshape(()) != 0
        factor = self._gradient_factor(batches, scale)
        rates = self._rates_on(device, groups)
        self.device_rate = rates[0]
        for batch in batches:
            values = FlatValues(self.masters, batch.parameters)
            self._update(batch, values, _unscaled(batch, factor), rates, skipped)
            values.write(skipped)
        for parameter in updated:
            # After the step, because torch's optimizers initialize a state only if it is empty.
            self.masters.add_to_state(parameter, self.optimizer.state)
        states = [
            (state, name, value)
            for state in map(self.optimizer.state.__getitem__, updated)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in KEYS
        ]
        self._plan = StepPlan(updated, list(map(version_of, updated)), states)

    # -- capture and replay ------------------------------------------------------------------------

    def recapture_key(self) -> tuple[Any, ...]:
        """Return what a captured step depends on: all numbers except for learning rates."""
        state, groups = self.optimizer.state, groups_of(self.optimizer)
        if state is not self._last_state:
            self._last_state, self._state_changes = state, self._state_changes + 1
        names = [name for name in self.optimizer.defaults if name != "lr"]
        numbers = [
            (
                id(group["params"]),
                len(group["params"]),
                _address(group["lr"]),
                *[group.get(name) for name in names],
            )
            for group in groups
        ]
        lacks_states = self._lacks_states(self._plan)
        return self._state_changes, lacks_states, self.masters.generation, numbers

    def before_capture(self) -> None:
        """Resync masters and move step counts: captured, that would run at every replay."""
        super().before_capture()
        if self._plan is not None:
            self._prepare(self._plan.parameters)

    def captured(self) -> tuple[StepPlan | None, Any]:
        """Return the parameters of the captured step, and the tensors that it reads."""
        updated = () if self._plan is None else self._plan.parameters
        states = [tuple(self.optimizer.state[parameter].values()) for parameter in updated]
        return self._plan, (self._rates, self._norm, states)

    def before_replay(self, plan: StepPlan) -> None:
        """Copy changed learning rates to the device, and resync masters."""
        if self._rates is not None:
            self._rates_on(self._rates.device, groups_of(self.optimizer))
        self._resync_written(plan)

    # -- parts of a step ---------------------------------------------------------------------------

    def _batches(self, groups: list[dict[str, Any]]) -> list[Batch]:
        """Return the parameters with a gradient in batches; none if one is not supported."""
        by_key: dict[Any, Batch] = {}
        device = None
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                device = parameter.device if device is None else device
                if gradient.device != device or not self._is_supported(parameter, gradient, group):
                    return []
                key = (index, *self._batch_key(parameter))
                batch = by_key.setdefault(key, Batch(index, [], []))
                batch.parameters.append(parameter)
                batch.gradients.append(gradient)
        return [part for batch in by_key.values() for part in _split(batch)]

    def _is_supported(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> bool:
        return (
            parameter.device.type in self.device_types
            and not group.get("differentiable")
            # Distributed tensors have no memory order of their own.
            and type(gradient) is torch.Tensor
            and gradient.layout is torch.strided
            and gradient.dtype in _GRADIENT_DTYPES
            and (parameter.dtype is torch.float32 or parameter in self.masters)
            and _launch.is_dense(parameter)
        )

    def _batch_key(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """Return the key of a batch: parameters with equal keys are updated together."""
        return parameter.dtype, parameter in self.masters

    def _needs_states(self, updated: Sequence[torch.Tensor], device: torch.device) -> bool:
        """Return whether this step creates states; raise if that happens in a capture."""
        if all(self.optimizer.state.get(parameter) for parameter in updated):
            return False
        if _launch.is_capturing(device):
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} has not stepped every parameter yet, and its"
                " states cannot be created in a CUDA graph. Run a step before the capture."
            )
        return True

    def _prepare(self, updated: Sequence[torch.Tensor]) -> None:
        """Bring masters up to date, and move step counts to the device."""
        for parameter in updated:
            if parameter in self.masters:
                self.masters.prepare_companion(parameter)
            state = self.optimizer.state.get(parameter, {})
            for name in self._host_states:
                if name in state:
                    state[name] = torch.as_tensor(
                        state[name], dtype=torch.float32, device=parameter.device
                    )

    def _gradient_factor(
        self, batches: Sequence[Batch], scale: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the factor that unscales and clips the gradients, on their device; None for 1."""
        gradients = [gradient for batch in batches for gradient in batch.gradients]
        factor = unscale_factor(scale)
        if factor is not None:
            factor = factor.to(gradients[0].device, non_blocking=True)
        if not self.computes_norm:
            return factor
        norm = total_norm(gradients)
        norm = norm if factor is None else norm * factor
        if self._norm is None:
            self._norm = norm
        else:
            self._norm.copy_(norm)
        if self.clip_norm is None:
            return factor
        # As torch.nn.utils.clip_grads_with_norm_.
        clipped = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return clipped if factor is None else factor * clipped

    def _rates_on(self, device: torch.device, groups: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Return the learning rates of all groups as float32 tensors on the device."""
        rates = [group["lr"] for group in groups]
        numbers = [0.0 if _address(rate) else float(rate) for rate in rates]
        # A captured copy would write the values of the capture at every replay: `before_replay`
        # copies what has changed.
        if self._rates is None or (
            numbers != self._rate_numbers and not _launch.is_capturing(device)
        ):
            self._rates = write_table(self._rates, device, torch.tensor(numbers))
            self._rate_numbers = numbers
        return [
            rate.to(device, torch.float32).reshape(()) if _address(rate) else number
            for rate, number in zip(rates, self._rates.unbind(), strict=True)
        ]

    def _update(
        self,
        batch: Batch,
        values: FlatValues,
        gradients: torch.Tensor,
        rates: Sequence[torch.Tensor],
        skipped: torch.Tensor | None,
    ) -> None:
        """Run torch's step over the float32 values of a batch; restore its states if skipped."""
        states = [
            value
            for parameter in batch.parameters
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and name not in KEYS
        ]
        saved = None if skipped is None else SavedTensors(states)
        temporaries = [Parameter(view) for view in values.views()]
        for temporary, gradient in zip(
            temporaries, views_like(gradients, batch.parameters), strict=True
        ):
            temporary.grad = gradient
        with self._only(batch, temporaries, rates):
            self._original_step(self.optimizer)
        if saved is not None and skipped is not None:
            saved.restore_if(skipped)

    @contextmanager
    def _only(
        self, batch: Batch, temporaries: list[Parameter], rates: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Let the optimizer step these float32 parameters only, in its capturable form."""
        groups, states = groups_of(self.optimizer), self.optimizer.state
        replaced = ("params", "lr", "capturable", "foreach")
        before = [{name: group[name] for name in replaced} for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group.update(params=[], lr=rate, capturable=True, foreach=True)
        groups[batch.group]["params"] = temporaries
        pairs = list(zip(batch.parameters, temporaries, strict=True))
        for parameter, temporary in pairs:
            if parameter in states:
                states[temporary] = states[parameter]
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)
            for parameter, temporary in pairs:
                if temporary in states:
                    states[parameter] = states.pop(temporary)


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, computed in float32. Does not synchronize.

    >>> total_norm([torch.tensor([3.0], dtype=torch.float16), torch.tensor([4.0])])
    tensor(5.)
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [norm for same in by_dtype.values() for norm in foreach_norm(same, dtype=torch.float32)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _unscaled(batch: Batch, factor: torch.Tensor | None) -> torch.Tensor:
    """Return the gradients of a batch in float32, unscaled and clipped, in memory order."""
    first = batch.parameters[0]
    total = sum(map(torch.Tensor.numel, batch.parameters))
    flat = torch.empty(total, dtype=torch.float32, device=first.device)
    foreach_copy_(views_like(flat, batch.parameters), batch.gradients)
    return flat if factor is None else flat.mul_(factor)


def _split(batch: Batch) -> Iterator[Batch]:
    """Split a batch into parts of nearly equal size, of at most `BATCH` elements if possible."""
    total = sum(map(torch.Tensor.numel, batch.parameters))
    limit = -(-total // max(1, -(-total // BATCH)))
    start = size = 0
    for index, parameter in enumerate(batch.parameters):
        if size and size + parameter.numel() > limit:
            yield _part(batch, start, index)
            start, size = index, 0
        size += parameter.numel()
    yield _part(batch, start, len(batch.parameters))


def _part(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(batch.group, batch.parameters[start:stop], batch.gradients[start:stop])


def _address(rate: Any) -> int:
    """Return the address of a learning rate that is a tensor on a device; 0 for a number."""
    if isinstance(rate, torch.Tensor) and _launch.needs_sync(rate.device):
        return rate.data_ptr()
    return 0
