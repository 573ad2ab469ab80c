"""Tables of the fused step: state and addresses per parameter, grouped into launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from mezzo import _launch
from mezzo.optim.companion import sample_spacing
from mezzo.optim.fused_algorithms import Algorithm, Group
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.types import Master
from mezzo.scaling import check_unscale
from mezzo.scaling.mesh import ProcessMesh, first_element, local, local_gradients, local_tensors
from mezzo.scaling.schedule_sync import groups_of

_STEPS, _DRAWS = 0, 1
"""Rows of the counters."""


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One parameter with all that its update reads and writes, except for the gradient."""

    parameter: torch.Tensor
    group: int
    """Index of its group."""
    index: int
    """Index of the parameter in the optimizer and in the counters."""
    shard: torch.Tensor
    """What is updated: the parameter, or if it is sharded, the shard of this process."""
    address: int
    """Address of the shard when the tables were made."""
    copies: int
    """Processes that hold each element; 1 if no parameter of the optimizer is sharded."""
    states: tuple[tuple[str, torch.Tensor], ...]
    """Names and tensors of the optimizer's state."""
    counters: tuple[tuple[str, torch.Tensor], ...]
    """Names and tensors of the counters in the optimizer's state."""
    companion: torch.Tensor | None
    """Companion tensor of a 16-bit parameter; None if it has none."""
    sample: torch.Tensor | None
    """Sample of the parameter, if its master format needs one."""


class _Momentum(NamedTuple):
    """A momentum buffer, and how many steps have gone into it."""

    buffer: torch.Tensor
    steps: torch.Tensor


class ParameterSlots:
    """Create the slots of an optimizer's parameters, and initialize missing optimizer state."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: MasterWeights, algorithm: Algorithm
    ) -> None:
        self._optimizer, self._masters, self._algorithm = optimizer, masters, algorithm
        self.counters = torch.zeros(2, 0)
        """float32 [2, parameters]: steps and random draws of each parameter. float32 counts exactly
        up to 2**24, as torch's own `step`."""
        self._momentum: dict[torch.Tensor, _Momentum] = {}
        """Momentum of parameters whose state does not count steps."""

    def of(
        self, parameters: Sequence[torch.Tensor], mesh: ProcessMesh | None = None
    ) -> list[ParameterSlot]:
        """Return the slots of parameters that have gradients on one device.

        `mesh` has the processes that hold all parameters of the optimizer, if some are sharded.
        """
        positions = [
            (group_index, parameter)
            for group_index, group in enumerate(groups_of(self._optimizer))
            for parameter in group["params"]
        ]
        if self.counters.shape[1] < len(positions) or self.counters.device != parameters[0].device:
            # The optimizer's state keeps the old counters, from which `_counters` fills new ones.
            self.counters = torch.zeros(2, len(positions), device=parameters[0].device)
        selected = set(parameters)
        return [
            self._make(group_index, index, parameter, mesh)
            for index, (group_index, parameter) in enumerate(positions)
            if parameter in selected
        ]

    def _make(
        self, group_index: int, index: int, parameter: torch.Tensor, mesh: ProcessMesh | None
    ) -> ParameterSlot:
        group, state = groups_of(self._optimizer)[group_index], self._optimizer.state[parameter]
        names = self._algorithm.states(group)
        column = self.counters[:, index]
        counters = self._counters(column, state, self._momentum_steps(parameter, state, names))
        for name in names:
            state[name] = self._state(parameter, state.get(name), group)
        if names and not self._algorithm.has_step_count:
            self._momentum[parameter] = _Momentum(state[names[0]], column[_STEPS])
        self._masters.add_to_state(parameter, self._optimizer.state)
        companion = sample = None
        if parameter in self._masters:
            companion = self._masters.companion_tensor(parameter)
            sample = self._masters.sample(parameter)
        return ParameterSlot(
            parameter,
            group_index,
            index,
            local(parameter),
            local(parameter).data_ptr(),
            1 if mesh is None else mesh.copies(parameter),
            tuple((name, state[name]) for name in names),
            counters,
            companion,
            sample,
        )

    def _state(
        self, parameter: torch.Tensor, existing: torch.Tensor | None, group: Group
    ) -> torch.Tensor:
        """Return a float32 state with the parameter's strides: the existing one if it fits."""
        if (
            existing is not None
            and existing.dtype is torch.float32
            and existing.stride() == parameter.stride()
            and existing.device == parameter.device
        ):
            return existing
        state = torch.full_like(
            parameter,
            self._algorithm.initial(group),
            dtype=torch.float32,
            memory_format=torch.preserve_format,
        )
        return state if existing is None else state.copy_(existing)

    def _momentum_steps(
        self, parameter: torch.Tensor, state: dict[str, Any], names: Sequence[str]
    ) -> torch.Tensor | float:
        """Return the steps that have gone into a momentum buffer, or 1 if that is not known."""
        if not names or any(state.get(name) is None for name in names):
            return 0.0
        momentum = self._momentum.get(parameter)
        if momentum is None or momentum.buffer is not state[names[0]]:
            return 1.0
        return momentum.steps

    def _counters(
        self, column: torch.Tensor, state: dict[str, Any], momentum_steps: torch.Tensor | float
    ) -> tuple[tuple[str, torch.Tensor], ...]:
        """Fill a parameter's column of the counters, and put views of it into its state."""
        counters = []
        if self._algorithm.has_step_count:
            column[_STEPS] = state.get("step", 0)
            state["step"] = column[_STEPS]
            counters.append(("step", state["step"]))
        else:
            # Not in the state: only distinguishes the first step that is not skipped, which
            # initializes the momentum.
            column[_STEPS] = momentum_steps
        if self._masters.format.master is Master.STOCHASTIC:
            column[_DRAWS] = state.get("draws", 0)
            state["draws"] = column[_DRAWS]
            counters.append(("draws", state["draws"]))
        return tuple(counters)


_GRADIENT, _DTYPE, _LAYOUT = map(attrgetter, ("grad", "dtype", "layout"))
_get: Callable[[Any, Any], Any] = dict.get
_COEFFICIENTS = 12
"""Rows of the coefficients, see `triton_coefficients.py`."""
_SIZES = 5
"""Row of `Launch.addresses` with the numbers of elements."""


@dataclass(frozen=True)
class Launch:
    """Parameters of one dtype, gradient dtype and variant, with their tables on the device."""

    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    variant: bool
    """Whether the algorithm's variant runs: SGD with momentum, Adam with amsgrad."""
    copies: int
    """Processes that hold each element of these parameters."""
    count: int
    """Number of parameters."""
    select: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Returns the items of this launch from a list over all parameters."""
    addresses: torch.Tensor
    """int64 [10, parameters]: parameter, companion, three states, number of elements, first
    program, sample, sample spacing, number of the first element in the whole parameter."""
    sizes: torch.Tensor
    """Numbers of elements: a row of `addresses`."""
    chunks: torch.Tensor
    """int32 [2, programs]: parameter, chunk of it."""
    indices: torch.Tensor
    """int32 [2, parameters]: index in the counters, group."""
    coefficients: torch.Tensor
    """float32 [12, parameters]: computed before every update."""


@dataclass
class LaunchPlan:
    """The launches that update a list of parameters, valid as long as `fits` returns True."""

    slots: list[ParameterSlot]
    launches: tuple[Launch, ...]
    state: Any
    """The optimizer's state, whose tensors are in the tables; loading a state replaces it."""
    generation: int
    """`MasterWeights.generation` of the companions in the tables."""
    variants: tuple[bool, ...]
    """Variant of each group: momentum that is switched on later needs a buffer."""
    dtypes: list[torch.dtype]
    """Dtypes of the gradients."""
    mesh: ProcessMesh | None = None
    """The processes that hold the parameters, if some are sharded."""
    versions: list[int] = field(default_factory=list)
    """Versions of the parameters after the last step, to notice writes by other code."""

    def __post_init__(self) -> None:
        self.parameters = [slot.parameter for slot in self.slots]
        self._strides = [slot.shard.stride() for slot in self.slots]
        """Strides of gradients that need no copy."""
        self._addresses = [slot.address for slot in self.slots]
        entries: list[tuple[Any, Any, Any]] = [
            (self.state[slot.parameter], name, tensor)
            for slot in self.slots
            for name, tensor in (*slot.states, *slot.counters)
        ]
        self._dicts, self._names, self._tensors = (
            [entry[row] for entry in entries] for row in range(3)
        )
        self._tables: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._reserved: list[torch.Tensor] = []
        """Tables for the next capture, outside the graph's memory pool. They are used once: two
        uses in one graph cannot share a table."""
        self._claimed: list[tuple[list[torch.Tensor], tuple[int, ...]]] = []
        """Tables that the current capture reads, and the addresses to write to them when it
        ends."""
        self._captured: list[Any] = []
        """Tensors to keep alive, because CUDA graphs read them at every replay."""
        self._is_captured = _launch.is_capturing(self.slots[0].shard.device)
        """Whether the plan was made in a capture: only replays of that graph fill its tables."""

    def note_written(self, versions: list[int]) -> None:
        """Note the versions after an update."""
        self.versions = versions

    def fits(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        state: Any,
        generation: int,
        variants: tuple[bool, ...],
    ) -> bool:
        """Return whether the tables are valid for these parameters and gradients."""
        return (
            not self._is_captured
            and len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and state is self.state
            and generation == self.generation
            and variants == self.variants
            and list(map(_DTYPE, gradients)) == self.dtypes
            and set(map(_LAYOUT, gradients)) == {torch.strided}
            and list(map(torch.Tensor.data_ptr, self._shards(parameters))) == self._addresses
            and self.has_states(state)
        )

    def has_states(self, state: Any) -> bool:
        """Return whether an optimizer's state has the tensors of the tables."""
        return len(state) >= len(self.parameters) and all(
            map(is_, map(_get, self._dicts, self._names), self._tensors)
        )

    def _shards(self, parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return parameters if self.mesh is None else local_tensors(parameters)

    def lay_out(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy gradients whose strides differ from their parameter's; return all gradients.

        The kernels read both in memory order. The copy becomes `parameter.grad`, so that the check,
        step hooks and the update use the same memory.
        """
        strides = list(map(torch.Tensor.stride, gradients))
        if strides == self._strides:
            return gradients
        to_copy = [
            (slot, gradient)
            for slot, gradient in zip(self.slots, gradients, strict=True)
            if not _same_memory_order(slot.shard, gradient)
        ]
        if not to_copy:
            self._strides = strides
            return gradients
        for slot, gradient in to_copy:
            slot.parameter.grad = torch.empty_like(slot.parameter, dtype=gradient.dtype)
            local(slot.parameter.grad).copy_(gradient)
        return gradients_of(self.parameters, self.mesh)

    def gradients_on(
        self, device: torch.device, gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the addresses of gradients, one table for each launch."""
        key = tuple(map(torch.Tensor.data_ptr, gradients))
        if _launch.is_capturing(device):
            return self._captured_tables(device, key)
        tables = self._tables.get(key)
        if tables is None:
            tables = [
                _launch.table_on(device, torch.tensor(launch.select(key), dtype=torch.int64))
                for launch in self.launches
            ]
            _launch.keep_recent(self._tables, key, tables)
        return tables

    def _captured_tables(self, device: torch.device, key: tuple[int, ...]) -> list[torch.Tensor]:
        """Return tables for one use in a CUDA graph, valid from its first replay."""
        if self._reserved:
            tables, self._reserved = self._reserved, []
            self._claimed.append((tables, key))
            return tables
        # The user's own capture, or a second use in one capture: the copies are captured too.
        return [
            _table_on(device, torch.tensor(launch.select(key), dtype=torch.int64))
            for launch in self.launches
        ]

    def reserve(self) -> None:
        """Allocate the address tables that the next capture will read."""
        self._claimed = []
        self._reserved = [
            torch.empty(launch.count, dtype=torch.int64, device=launch.addresses.device)
            for launch in self.launches
        ]

    def fill_captured(self) -> None:
        """Fill the tables of the capture that has just ended, and keep them for its replays."""
        for tables, key in self._claimed:
            for launch, table in zip(self.launches, tables, strict=True):
                addresses = torch.tensor(launch.select(key), dtype=torch.int64)
                table.copy_(_launch.pinned_for(table.device, addresses), non_blocking=True)
            self._captured.append(tables)
        self._reserved, self._claimed = [], []


class _LaunchKey(NamedTuple):
    """What a kernel is compiled for: parameters that differ in it need separate launches."""

    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    variant: bool
    copies: int


def make_launches(
    slots: Sequence[ParameterSlot],
    dtypes: Sequence[torch.dtype],
    variants: Sequence[bool],
    chunk: int,
) -> tuple[Launch, ...]:
    """Group parameters into launches. Groups with different hyper-parameters share a launch."""
    indices_by_key: dict[_LaunchKey, list[int]] = {}
    for index, (slot, dtype) in enumerate(zip(slots, dtypes, strict=True)):
        key = _LaunchKey(slot.parameter.dtype, dtype, variants[slot.group], slot.copies)
        indices_by_key.setdefault(key, []).append(index)
    return tuple(
        _make_launch(key, indices, [slots[index] for index in indices], chunk)
        for key, indices in indices_by_key.items()
    )


def _make_launch(
    key: _LaunchKey, indices: Sequence[int], slots: Sequence[ParameterSlot], chunk: int
) -> Launch:
    device = slots[0].parameter.device
    sizes = [slot.shard.numel() for slot in slots]
    programs = [-(-size // chunk) for size in sizes]
    first_programs = accumulate(programs[:-1], initial=0)
    rows = [_row(slot, first) for slot, first in zip(slots, first_programs, strict=True)]
    addresses = _table_on(device, torch.tensor(rows, dtype=torch.int64).T.contiguous())
    counters_and_groups = [[slot.index for slot in slots], [slot.group for slot in slots]]
    return Launch(
        *key,
        count=len(slots),
        # itemgetter with one index returns the item, not a tuple.
        select=itemgetter(*indices) if len(indices) > 1 else lambda items: (items[indices[0]],),
        addresses=addresses,
        sizes=addresses[_SIZES],
        chunks=_table_on(device, _launch.chunks_of(sizes, chunk)),
        indices=_table_on(device, torch.tensor(counters_and_groups, dtype=torch.int32)),
        coefficients=torch.zeros(_COEFFICIENTS, len(slots), dtype=torch.float32, device=device),
    )


def _table_on(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """Copy a table to a device; keep the source of a captured copy, which every replay reads."""
    copied, source = _launch.staged_on(device, table)
    if _launch.is_capturing(device):
        check_unscale.keep_captured(source)
    return copied


def _row(slot: ParameterSlot, first_program: int) -> Iterable[int]:
    """Return the column of `Launch.addresses` of one parameter."""
    states = [local(tensor).data_ptr() for _, tensor in slot.states]
    companion, sample = (
        0 if tensor is None else tensor.data_ptr() for tensor in (slot.companion, slot.sample)
    )
    numel = slot.shard.numel()
    return [
        slot.address,
        companion,
        *states,
        *[0] * (3 - len(states)),
        numel,
        first_program,
        sample,
        sample_spacing(numel),
        first_element(slot.parameter),
    ]


def gradients_of(
    parameters: Sequence[torch.Tensor], mesh: ProcessMesh | None
) -> list[torch.Tensor]:
    """Return the gradients of parameters; this process's shards if a mesh holds them."""
    return list(map(_GRADIENT, parameters)) if mesh is None else local_gradients(parameters)


def _same_memory_order(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape store their elements in the same order.

    The stride of a dimension of size 1 does not matter.
    """
    return all(
        size == 1 or stride == other_stride
        for size, stride, other_stride in zip(
            first.shape, first.stride(), second.stride(), strict=True
        )
    )
