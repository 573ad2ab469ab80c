"""Master weights of an optimizer's 16-bit parameters.

Each parameter has a companion tensor, whose content the master format defines. Other code may write
a parameter at any time (`clamp_`, `load_state_dict`, swapped weights): the companion of the old
value must then not be used. That is noticed by the parameter's version or by a sample of it.

The companion of a sharded parameter belongs to the shard of this process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from mezzo.optim.companion import Companion, sampled
from mezzo.optim.master_formats import MASTER_FORMATS, MasterFormat, RandomDraw, float32_values
from mezzo.policy.types import Master
from mezzo.scaling.mesh import any_sharded, is_sharded, local, set_local, sharded_like

Parameter = torch.nn.Parameter

version_of = attrgetter("_version")

_MAX_WRITES = 3
"""Writes by other code to one parameter after which a warning is given."""
_UNKNOWN = -1
"""A version that no tensor has."""


class MasterWeights:
    """Companion tensors of 16-bit parameters, and the float32 values that both make up.

    If other code writes a parameter, its new value counts, and the companion is dropped. Split and
    Kahan masters notice a write by the parameter's version, or by its sample if a write through
    `.data` covers most of the parameter. Float32 masters compare values.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0 + 2.0**-20]))
    >>> masters = MasterWeights("split")
    >>> masters.adopt(weight, torch.bfloat16)
    >>> weight.data, masters.read(weight)[1].item() == 1.0 + 2.0**-20
    (tensor([1., 1.], dtype=torch.bfloat16), True)
    """

    def __init__(self, master: str | Master = Master.FLOAT32, seed: int = 0) -> None:
        self.format: MasterFormat = MASTER_FORMATS[Master.parse(master)]
        self.seed = seed
        self.generation = 0
        """Increases when a companion tensor is added, removed or replaced. Tables of addresses are
        valid for one generation."""
        self._companions: dict[torch.Tensor, Companion | None] = {}
        # Keys are `id(parameter)`: hashing a tensor is a Python call, which takes 100 µs a step for
        # 150 parameters.
        self._versions: dict[int, int] = {}
        """Parameter id → the version of the parameter that its companion is for."""
        self._loaded: set[int] = set()
        """Ids of parameters whose companion was loaded and not used yet. The parameter may be
        loaded before or after it, so that the sample decides and not the version."""
        self._unsampled: set[int] = set()
        """Ids of parameters whose companion was loaded without a sample, as companions of shards
        are saved. It is for the value that the parameter has when the companion is used."""
        self._dropped: dict[int, int] = {}
        """Parameter id → how often its companion was dropped because other code wrote it."""
        self._warned = False
        self._has_shards = False
        """Whether parameters are sharded over processes: otherwise no step looks for shards."""
        self._pending: dict[torch.Tensor, Companion] = {}
        """Loaded companions of another format. They are converted at the next step, when the
        parameter is loaded too."""

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._companions

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._companions)

    def adopt(self, parameter: Parameter, dtype: torch.dtype) -> None:
        """Cast a parameter to a 16-bit dtype in place, and store its float32 value."""
        self._has_shards |= is_sharded(parameter)
        value = self._shard(parameter.detach())
        rounded, companion = self.format.split(value.float(), dtype)
        set_local(parameter, _with_strides_of(value, rounded))
        self._add(parameter, companion, value)

    def take_over(self, parameter: torch.Tensor, owner: MasterWeights) -> None:
        """Store the float32 value of a 16-bit parameter that other masters have stored so far.

        Its memory and dtype stay: a captured graph may read it, and with another dtype it would
        lose the autograd node whose hooks DistributedDataParallel waits for.
        """
        self._has_shards |= is_sharded(parameter)
        value = owner.read(parameter)
        owner._remove(parameter)
        companion = self.format.split(self._shard(value), parameter.dtype)[1]
        self._add(parameter, companion, self._shard(parameter.detach()))
        self.write(parameter, value)

    def release(self, parameter: Parameter) -> None:
        """Cast a parameter back to float32 with its master value, and remove it."""
        set_local(parameter, local(self.read(parameter)))
        self._remove(parameter)

    def _add(
        self, parameter: torch.Tensor, companion: torch.Tensor | None, like: torch.Tensor
    ) -> None:
        """Store the companion of a parameter, with the strides of another tensor."""
        sample = sampled(parameter).clone() if self.format.sampled else None
        self._companions[parameter] = (
            None
            if companion is None
            else Companion(self.format, _with_strides_of(like, companion), sample)
        )
        self._mark_current(parameter)
        self.generation += 1

    def _remove(self, parameter: torch.Tensor) -> None:
        self._mark_current(parameter)
        del self._companions[parameter], self._versions[id(parameter)]
        self.generation += 1

    # -- values ------------------------------------------------------------------------------------

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter as a new tensor. Does not synchronize."""
        self.resync(parameter)
        companion, shard = self.companion(parameter), self._shard(parameter.detach())
        value = self.format.merge(shard, None) if companion is None else companion.value(shard)
        # Elementwise ops do not keep the strides of dimensions of size 1, by which torch recognizes
        # channels_last.
        value = _with_strides_of(shard, value)
        return sharded_like(parameter, value) if self._has_shards else value

    def write(
        self, parameter: torch.Tensor, value: torch.Tensor, draw: RandomDraw | None = None
    ) -> None:
        """Set the float32 value of a parameter: write it and its companion in place."""
        rounded, companion_value = self.format.split(self._shard(value), parameter.dtype, draw)
        companion = self._companions[parameter]
        with torch.no_grad():
            self._shard(parameter).copy_(rounded)
            if self._has_shards:
                # Only the version of the shard has changed.
                torch.autograd.graph.increment_version(parameter)
            if companion is not None and companion_value is not None:
                companion.tensor.copy_(companion_value)
                _resample(companion, parameter)
        self._mark_current(parameter)

    def _shard(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor) if self._has_shards else tensor

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter: the live float32 master, else a new tensor."""
        self.prepare_companion(parameter)
        value, live = self.read(parameter), self.companion_tensor(parameter)
        return live.copy_(value) if live is not None and live.dtype is torch.float32 else value

    def reader(self, parameters: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Return a function that reads these parameters like `current`, in few launches.

        It is valid as long as `generation` stays the same.
        """
        parameters = list(parameters)
        companions = [self.companion_tensor(parameter) for parameter in parameters]
        versions: list[int] = []
        has_shards = any_sharded(parameters)

        def read() -> list[torch.Tensor]:
            if list(map(version_of, parameters)) != versions:
                for parameter in parameters:
                    self.prepare_companion(parameter)
                versions[:] = map(version_of, parameters)
            if not has_shards:
                return float32_values(self.format, parameters, companions)
            values = float32_values(self.format, list(map(local, parameters)), companions)
            return list(map(sharded_like, parameters, values))

        return read

    # -- writes by other code ----------------------------------------------------------------------

    def resync(self, parameter: torch.Tensor) -> bool:
        """Drop the companion of a parameter if other code has written it; return whether it has.

        Float32 masters are kept, because reading them compares values.
        """
        if parameter._version == self._versions[id(parameter)]:
            return False
        companion = self._companions[parameter]
        self._versions[id(parameter)] = parameter._version
        if companion is not None and companion.sample is not None:
            if id(parameter) not in self._loaded:
                companion.tensor.zero_()
                _resample(companion, parameter)
                self._warn_of_repeated_writes(parameter)
            elif id(parameter) in self._unsampled:
                _resample(companion, parameter)
        return True

    def prepare_companion(self, parameter: torch.Tensor) -> None:
        """Bring a companion up to date, in this format, before a kernel reads it."""
        was_written = self.resync(parameter)
        # Compare a float32 master with every element once, here: the kernel compares only the first
        # elements of each chunk.
        if parameter in self._pending or (was_written and self.format.master is Master.FLOAT32):
            self.write(parameter, self.read(parameter))

    def mark_written(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Record that parameters were written with their companions; return their versions."""
        versions = list(map(version_of, parameters))
        self._versions.update(zip(map(id, parameters), versions, strict=True))
        if self._loaded:
            self._loaded.difference_update(map(id, parameters))
            self._unsampled.intersection_update(self._loaded)
        return versions

    def _mark_current(self, parameter: torch.Tensor) -> None:
        self._versions[id(parameter)] = parameter._version
        self._loaded.discard(id(parameter))
        self._unsampled.discard(id(parameter))
        self._pending.pop(parameter, None)

    def _warn_of_repeated_writes(self, parameter: torch.Tensor) -> None:
        self._dropped[id(parameter)] = self._dropped.get(id(parameter), 0) + 1
        if self._dropped[id(parameter)] == _MAX_WRITES and not self._warned:
            self._warned = True
            master = self.format.master.value
            warnings.warn(
                f"A parameter of shape {tuple(parameter.shape)} was written {_MAX_WRITES} times"
                f" between steps (clamp_, SAM, swapped weights). master={master!r}"
                " cannot tell which elements changed, and drops the part of each update that 16"
                " bits do not hold. Use master='float32', which compares values.",
                UserWarning,
                stacklevel=2,
            )

    # -- companions --------------------------------------------------------------------------------

    def companion_tensor(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the live companion tensor of a parameter; None if the format has none."""
        companion = self._companions[parameter]
        return None if companion is None else companion.tensor

    def sample(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the live sample of a parameter, which kernels update; None if it has none."""
        companion = self._companions[parameter]
        return None if companion is None else companion.sample

    def companion(self, parameter: torch.Tensor) -> Companion | None:
        """Return what `read` uses: a loaded companion that is pending, else the live one."""
        return self._pending.get(parameter) or self._companions[parameter]

    def add_to_state(self, parameter: torch.Tensor, states: Any) -> None:
        """Add a parameter's companion to its state in an optimizer, as live tensors.

        Only after the optimizer's own first step of that parameter: torch's optimizers initialize a
        state only if it is empty.
        """
        companion = self._companions.get(parameter)
        if companion is not None:
            sharded = self._has_shards and is_sharded(parameter)
            states[parameter].update(companion.entries(parameter, sharded=sharded))
        elif parameter in self and self.format.master is Master.STOCHASTIC:
            states[parameter].setdefault("draws", torch.zeros(()))

    def load(self, parameter: torch.Tensor, saved: Companion) -> None:
        """Load a saved companion of any format.

        It is used once the parameter has the value that it is for, which may be loaded before or
        after it.
        """
        live = self._companions[parameter]
        if live is None:
            return
        if saved.format is not live.format:
            self.generation += 1
            self._pending[parameter] = Companion(
                saved.format,
                saved.tensor.clone(),
                None if saved.sample is None else saved.sample.clone(),
            )
            return
        self._pending.pop(parameter, None)
        live.tensor.copy_(saved.tensor)
        self._unsampled.discard(id(parameter))
        if live.sample is not None and saved.sample is not None:
            if saved.has_sample:
                live.sample.copy_(saved.sample)
            else:
                self._unsampled.add(id(parameter))
        self._loaded.add(id(parameter))
        self._versions[id(parameter)] = _UNKNOWN

    # -- backup ------------------------------------------------------------------------------------

    def backup(self, parameter: torch.Tensor) -> Callable[[], None]:
        """Copy a parameter and its companion; return a function that writes both back in place."""
        self.prepare_companion(parameter)
        shard = local(parameter.detach())
        tensors = (shard, self.companion_tensor(parameter), self.sample(parameter))
        live = [tensor for tensor in tensors if tensor is not None]
        copies = [tensor.clone() for tensor in live]

        def restore() -> None:
            for tensor, value in zip(live, copies, strict=True):
                tensor.copy_(value)
            # Otherwise the next step would see a write by other code, and drop the companion.
            self._mark_current(parameter)

        return restore

    def snapshot(self) -> Callable[[], None]:
        """Copy all companions to host memory; return a function that writes them back.

        Call it after the parameters were restored: it also restores which companions are current.
        """
        live = [
            tensor
            for companion in self._companions.values()
            if companion is not None
            for tensor in (companion.tensor, companion.sample)
            if tensor is not None
        ]
        copies = [tensor.to("cpu", copy=True) for tensor in live]
        current = [
            parameter
            for parameter in self._companions
            if parameter._version == self._versions[id(parameter)]
        ]
        companions, loaded = dict(self._companions), set(self._loaded)
        unsampled = set(self._unsampled)
        dropped, pending, warned = dict(self._dropped), dict(self._pending), self._warned

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in zip(live, copies, strict=True):
                    tensor.copy_(value)
            self._companions, self._loaded, self._unsampled = companions, loaded, unsampled
            self._dropped, self._pending, self._warned = dropped, pending, warned
            self._versions = {
                **{id(parameter): _UNKNOWN for parameter in companions},
                **{id(parameter): parameter._version for parameter in current},
            }
            self.generation += 1

        return restore


def _resample(companion: Companion, parameter: torch.Tensor) -> None:
    if companion.sample is not None:
        companion.sample.copy_(sampled(parameter))


def _with_strides_of(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of another, because kernels read both in memory order."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
