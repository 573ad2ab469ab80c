"""The master weights of an optimizer's 16-bit parameters, and what notices that a parameter was written by other code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from mezzo._launch import is_dense
from mezzo.optim.master_formats import MASTER_FORMATS, MasterFormat, RandomDraw, values_of
from mezzo.policy.types import Master

SAMPLES = 128
"""The most elements of a sample; a power of two, as the kernel that compares needs it."""

_MAGNITUDE = 0x7FFF
"""The bits of a 16-bit number but for its sign."""


def spacing(numel: int) -> int:
    """Return how far sampled elements lie apart, as a power of two: with 3, elements 0, 8, 16 and so on.

    >>> [spacing(numel) for numel in (0, 1, 128, 129, 4096)]
    [0, 0, 0, 1, 5]
    """
    return max(0, (numel - 1).bit_length() - (SAMPLES.bit_length() - 1))


def sampled(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter's sampled elements.

    >>> sampled(torch.arange(256)).tolist() == list(range(0, 256, 2))
    True
    """
    value = parameter.detach()
    # In the order of memory, which is all that a kernel sees.
    flat = value.as_strided((value.numel(),), (1,)) if is_dense(value) else value.reshape(-1)
    return flat[:: 1 << spacing(flat.numel())]


def belongs(parameter: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return whether a parameter still has the values of a sample, as a bool on its device: no synchronization.

    It has not if at least half of the sampled elements are others, as after `fill_` or a new
    initialization. A few may be: dropping the companion of a whole weight that is clamped or masked
    after each step would lose every small update. Elements that are zero now are left out, because
    every kind deals with these by itself.

    >>> weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    >>> [belongs(torch.tensor(values).bfloat16(), weight).item() for values in ([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], [1.0, 0.0, 0.0])]
    [True, False, True]
    """
    now = sampled(parameter).view(torch.int16)
    there = (now & _MAGNITUDE) != 0
    changed = (there & (now != sample.view(torch.int16))).sum()
    return (changed == 0) | (2 * changed < there.sum())


MASTER = "mezzo_master"
"""The name of a companion tensor in a parameter's state, whatever its kind."""

_SAMPLES = {
    f"mezzo_{kind.master.value}_sample": kind for kind in MASTER_FORMATS.values() if kind.sampled
}
"""The name of a sample tells the kind: torch casts state to the parameter's dtype when a plain
optimizer loads it, so that the dtype of the tensor may not."""

KEYS = frozenset({MASTER, *_SAMPLES})
"""What mezzo adds to the state of a parameter."""


@dataclass(frozen=True, eq=False)
class Companion:
    """A companion tensor, with the sample that tells which parameter value it belongs to."""

    kind: MasterFormat
    tensor: torch.Tensor
    sample: torch.Tensor | None
    """Of the parameter, where the kind needs one."""

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter: exact where this belongs to it, else the 16-bit value. Does not synchronize."""
        tensor = (
            self.tensor
            if self.sample is None
            else torch.where(belongs(parameter, self.sample), self.tensor, 0)
        )
        return self.kind.merge(parameter.detach(), tensor)

    def entries(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in a parameter's state."""
        if self.sample is None:
            return {MASTER: self.tensor}
        return {
            MASTER: self.tensor,
            **{name: self.sample for name, kind in _SAMPLES.items() if kind is self.kind},
        }

    @classmethod
    def read(cls, state: Mapping[str, Any], parameter: torch.Tensor) -> Companion | None:
        """Read a companion for a 16-bit parameter from a state; None if there is none, or none that can be read."""
        tensor = state.get(MASTER)
        # Not always a tensor: of a flattened state, torch.distributed.checkpoint reads what is
        # missing as an empty dict.
        if not isinstance(tensor, torch.Tensor):
            return None
        for name, kind in _SAMPLES.items():
            sample = state.get(name)
            if isinstance(sample, torch.Tensor):
                half = torch.bfloat16 if kind.master is Master.SPLIT else parameter.dtype
                if half is not parameter.dtype:
                    return None
                return cls(
                    kind,
                    tensor.to(parameter.device, kind.companion_dtype(half)),
                    sample.to(parameter.device, half),
                )
        return (
            cls(MASTER_FORMATS[Master.FLOAT32], tensor.to(parameter.device), None)
            if tensor.dtype is torch.float32
            else None
        )


def without_companion(state: Any) -> Any:
    """Return a parameter's state without what mezzo added to it."""
    return (
        {name: value for name, value in state.items() if name not in KEYS}
        if isinstance(state, Mapping)
        else state
    )


def has_companion(state: Any) -> bool:
    """Return whether a parameter's state holds a companion tensor."""
    return isinstance(state, Mapping) and isinstance(state.get(MASTER), torch.Tensor)


def misfit(state: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of a companion whose shape is not that of a parameter, or of its sample; None if all fit."""
    wanted = {MASTER: parameter.shape, **dict.fromkeys(_SAMPLES, sampled(parameter).shape)}
    found = (
        (state[name], shape)
        for name, shape in wanted.items()
        if isinstance(state.get(name), torch.Tensor)
    )
    return next((tensor for tensor, shape in found if tensor.shape != shape), None)


Parameter = torch.nn.Parameter

VERSION = attrgetter("_version")

_REPEATED = 3
"""Writes by other code to one parameter that are reported."""
_UNKNOWN = -1
"""The version of no tensor."""


class MasterWeights:
    """What lies beside each 16-bit parameter, and the float32 value that both make up.

    A parameter may be written by others (`clamp_`, `load_state_dict`, a copy of averaged weights):
    its value then counts, not what lay beside the old one. Split and Kahan masters see a write by
    the parameter's version, or by its sample where a write through `.data` covers most of the
    parameter.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0 + 2.0**-20]))
    >>> masters = MasterWeights("split")
    >>> masters.adopt(weight, torch.bfloat16)
    >>> weight.data, masters.read(weight)[1].item() == 1.0 + 2.0**-20
    (tensor([1., 1.], dtype=torch.bfloat16), True)
    """

    def __init__(self, master: str | Master = Master.FLOAT32, seed: int = 0) -> None:
        self.kind: MasterFormat = MASTER_FORMATS[Master.parse(master)]
        self.seed = seed
        self.generation = 0
        """Counts what replaced a tensor that lies beside a parameter: tables of addresses are
        good for one generation."""
        self._companions: dict[torch.Tensor, Companion | None] = {}
        # By `id`: to hash a tensor is a call into Python, which for 150 parameters takes 100 µs a
        # step.
        self._seen: dict[int, int] = {}
        """Parameter → the version at which what lies beside it was its."""
        self._loaded: set[int] = set()
        """Parameters whose companion was loaded and not used yet: the parameter may be loaded
        before it or after it, and the sample decides."""
        self._dropped: dict[int, int] = {}
        """Parameter → how often other code wrote it, and its companion was dropped."""
        self._warned = False
        self._pending: dict[torch.Tensor, Companion] = {}
        """Companions of another kind that were loaded: they are turned into this kind at the
        next step, when the parameter is loaded too."""

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._companions

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._companions)

    def adopt(self, parameter: Parameter, half: torch.dtype) -> None:
        """Make a float32 parameter 16-bit, the same object, and keep its exact value."""
        value = parameter.detach()
        rounded, beside = self.kind.split(value.float(), half)
        parameter.data = _laid_out_as(value, rounded)
        sample = sampled(parameter).clone() if self.kind.sampled else None
        self._companions[parameter] = (
            None if beside is None else Companion(self.kind, _laid_out_as(value, beside), sample)
        )
        self._note(parameter)
        self.generation += 1

    def release(self, parameter: Parameter) -> None:
        """Give a parameter its exact float32 value back, and forget it."""
        parameter.data = self.read(parameter)
        self._note(parameter)
        del self._companions[parameter], self._seen[id(parameter)]
        self.generation += 1

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The float32 value of a parameter, exact as far as its kind is; a tensor of its own."""
        self.resync(parameter)
        companion = self.companion(parameter)
        value = (
            self.kind.merge(parameter.detach(), None)
            if companion is None
            else companion.value(parameter)
        )
        # Ops between tensors forget the strides of dimensions of size 1, by which torch tells
        # channels_last.
        return _laid_out_as(parameter, value)

    def write(
        self, parameter: torch.Tensor, value: torch.Tensor, draw: RandomDraw | None = None
    ) -> None:
        """Set the float32 value of a parameter: both it and what lies beside it, in place."""
        rounded, beside = self.kind.split(value, parameter.dtype, draw)
        companion = self._companions[parameter]
        with torch.no_grad():
            parameter.copy_(rounded)
            if companion is not None and beside is not None:
                companion.tensor.copy_(beside)
                _resample(companion, parameter)
        self._note(parameter)

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter: the live master where masters are float32 tensors, else a copy."""
        self.settle(parameter)
        value, held = self.read(parameter), self.companion_tensor(parameter)
        return held.copy_(value) if held is not None and held.dtype is torch.float32 else value

    def reader(self, parameters: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Return a function that gives the float32 values of these parameters in few launches: live masters where they are float32 tensors, else copies.

        It is good for as long as `generation` is the same.
        """
        parameters, beside = (
            list(parameters),
            [self.companion_tensor(parameter) for parameter in parameters],
        )
        versions: list[int] = []

        def read() -> list[torch.Tensor]:
            if list(map(VERSION, parameters)) != versions:
                for parameter in parameters:
                    self.settle(parameter)
                versions[:] = map(VERSION, parameters)
            return values_of(self.kind, parameters, beside)

        return read

    def hold(self, parameter: torch.Tensor) -> Callable[[], None]:
        """Copy a parameter and its companion; call what is returned to write both back, to the bit and in place."""
        self.settle(parameter)
        live = [
            tensor
            for tensor in (
                parameter.detach(),
                self.companion_tensor(parameter),
                self.sample(parameter),
            )
            if tensor is not None
        ]
        before = [tensor.clone() for tensor in live]

        def restore() -> None:
            for tensor, value in zip(live, before, strict=True):
                tensor.copy_(value)
            # Else the next step would take the parameter for one that others wrote, and drop its
            # remainder.
            self._note(parameter)

        return restore

    def snapshot(self) -> Callable[[], None]:
        """Copy all companions to host memory; call what is returned to write them back, after the parameters were, with all that is known of both."""
        live = [
            one
            for held in self._companions.values()
            if held is not None
            for one in (held.tensor, held.sample)
            if one is not None
        ]
        copies = [one.to("cpu", copy=True) for one in live]
        current = [
            parameter
            for parameter in self._companions
            if parameter._version == self._seen[id(parameter)]
        ]
        companions, loaded, dropped, pending, warned = (
            dict(self._companions),
            set(self._loaded),
            dict(self._dropped),
            dict(self._pending),
            self._warned,
        )

        def restore() -> None:
            with torch.no_grad():
                for one, value in zip(live, copies, strict=True):
                    one.copy_(value)
            self._companions, self._loaded, self._dropped, self._pending, self._warned = (
                companions,
                loaded,
                dropped,
                pending,
                warned,
            )
            self._seen = {
                **{id(parameter): _UNKNOWN for parameter in companions},
                **{id(parameter): parameter._version for parameter in current},
            }
            self.generation += 1

        return restore

    def companion_tensor(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What lies beside a parameter."""
        companion = self._companions[parameter]
        return None if companion is None else companion.tensor

    def sample(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sample of a parameter, where the kind needs one; the kernel writes it with the parameter."""
        companion = self._companions[parameter]
        return None if companion is None else companion.sample

    def companion(self, parameter: torch.Tensor) -> Companion | None:
        """What the value of a parameter is read from: its companion, or one of another kind that was loaded and not used yet."""
        return self._pending.get(parameter) or self._companions[parameter]

    def show(self, parameter: torch.Tensor, states: Any) -> None:
        """Add what a step keeps for a parameter to its state in an optimizer, as live tensors.

        Only after the optimizer's own first step of that parameter: torch's optimizers begin a
        state that is empty, and no other.
        """
        companion = self._companions.get(parameter)
        if companion is not None:
            states[parameter].update(companion.entries())
        elif parameter in self and self.kind.master is Master.STOCHASTIC:
            states[parameter].setdefault("draws", torch.zeros(()))

    def resync(self, parameter: torch.Tensor) -> bool:
        """Where others wrote a parameter, drop what lay beside the old value; say whether they did. A float32 master compares values, and is left to that."""
        if parameter._version == self._seen[id(parameter)]:
            return False
        companion = self._companions[parameter]
        self._seen[id(parameter)] = parameter._version
        if (
            companion is not None
            and companion.sample is not None
            and id(parameter) not in self._loaded
        ):
            companion.tensor.zero_()
            _resample(companion, parameter)
            self._warn_of_repeated_writes(parameter)
        return True

    def _warn_of_repeated_writes(self, parameter: torch.Tensor) -> None:
        """Warn once when other code writes a parameter again and again: each time, what rounding had left of its updates is dropped."""
        self._dropped[id(parameter)] = self._dropped.get(id(parameter), 0) + 1
        if self._dropped[id(parameter)] == _REPEATED and not self._warned:
            self._warned = True
            warnings.warn(
                f"A parameter of shape {tuple(parameter.shape)} was written {_REPEATED} times"
                f" between steps (clamp_, SAM, swapped weights). master={self.kind.master.value!r}"
                " cannot tell which elements changed, and drops the part of each update that 16"
                " bits do not hold. Use master='float32', which compares values.",
                UserWarning,
                stacklevel=2,
            )

    def settle(self, parameter: torch.Tensor) -> None:
        """Make a companion ready for a kernel that updates it: follow other writers, and take over what was loaded from another kind."""
        followed = self.resync(parameter)
        # A float32 master is compared value by value, once; the kernel looks at the first of each
        # block only.
        if parameter in self._pending or (followed and self.kind.master is Master.FLOAT32):
            self.write(parameter, self.read(parameter))

    def noted(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Somebody wrote these parameters together with what lies beside them; their versions."""
        versions = list(map(VERSION, parameters))
        self._seen.update(zip(map(id, parameters), versions, strict=True))
        if self._loaded:
            self._loaded.difference_update(map(id, parameters))
        return versions

    def load(self, parameter: torch.Tensor, saved: Companion) -> None:
        """Take over a companion that was saved, of whatever kind. It counts once the parameter has the value that it belongs to: that may be loaded before or after."""
        own = self._companions[parameter]
        if own is None:
            return
        if saved.kind is not own.kind:
            self.generation += 1
            self._pending[parameter] = Companion(
                saved.kind,
                saved.tensor.clone(),
                None if saved.sample is None else saved.sample.clone(),
            )
            return
        self._pending.pop(parameter, None)
        own.tensor.copy_(saved.tensor)
        if own.sample is not None and saved.sample is not None:
            own.sample.copy_(saved.sample)
        self._loaded.add(id(parameter))
        self._seen[id(parameter)] = _UNKNOWN

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen[id(parameter)] = parameter._version
        self._loaded.discard(id(parameter))
        self._pending.pop(parameter, None)


def _resample(companion: Companion, parameter: torch.Tensor) -> None:
    if companion.sample is not None:
        companion.sample.copy_(sampled(parameter))


def _laid_out_as(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of another tensor: parameter, gradient, master and state go through one kernel side by side."""
    return (
        new if new.stride() == old.stride() else torch.empty_like(old, dtype=new.dtype).copy_(new)
    )
