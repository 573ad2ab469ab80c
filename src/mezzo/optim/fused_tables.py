"""Per-parameter state and address tables of the fused step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from mezzo import _launch
from mezzo.optim.fused_algorithms import Algorithm, Group
from mezzo.optim.master_weights import MasterWeights, spacing
from mezzo.policy.types import Master
from mezzo.scaling.schedule_sync import groups_of

_STEPS, _DRAWS = 0, 1


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One parameter with everything that its update reads and writes, but for the gradient."""

    parameter: torch.Tensor
    group: int
    """The place of its group."""
    index: int
    """Its place in the optimizer, and among the counters."""
    address: int
    """Where its data lay when tables were made."""
    states: tuple[tuple[str, torch.Tensor], ...]
    """Name → tensor, as the optimizer's state has them."""
    counters: tuple[tuple[str, torch.Tensor], ...]
    """Counters that the optimizer's state shows."""
    companion: torch.Tensor | None
    """What lies beside a 16-bit parameter."""
    sample: torch.Tensor | None
    """Of the parameter, where what lies beside it needs one."""


class ParameterSlots:
    """Makes the slots of an optimizer's parameters from its state, which it completes."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: MasterWeights, algorithm: Algorithm
    ) -> None:
        self._optimizer, self._masters, self._algorithm = optimizer, masters, algorithm
        self.counters = torch.zeros(2, 0)
        """float32 [2, parameters]: steps and draws of each. float32 counts exactly to 2**24, as
        torch's own `step`."""

    def of(self, parameters: Sequence[torch.Tensor]) -> list[ParameterSlot]:
        """The slots of parameters that have gradients on one device."""
        groups = groups_of(self._optimizer)
        places = [
            (number, parameter)
            for number, group in enumerate(groups)
            for parameter in group["params"]
        ]
        if self.counters.shape[1] < len(places) or self.counters.device != parameters[0].device:
            # States hold their counters, in the old memory as well as in the new.
            self.counters = torch.zeros(2, len(places), device=parameters[0].device)
        wanted = set(parameters)
        return [
            self._make(group, place, parameter)
            for place, (group, parameter) in enumerate(places)
            if parameter in wanted
        ]

    def _make(self, group: int, place: int, parameter: torch.Tensor) -> ParameterSlot:
        options, state = groups_of(self._optimizer)[group], self._optimizer.state[parameter]
        names = self._algorithm.states(options)
        begun = all(state.get(name) is not None for name in names)
        shown = self._counters(self.counters[:, place], state, begun=begun and bool(names))
        for name in names:
            state[name] = self._state(parameter, state.get(name), options)
        self._masters.show(parameter, self._optimizer.state)
        beside, sample = (
            (self._masters.companion_tensor(parameter), self._masters.sample(parameter))
            if parameter in self._masters
            else (None, None)
        )
        return ParameterSlot(
            parameter,
            group,
            place,
            parameter.data_ptr(),
            tuple((name, state[name]) for name in names),
            shown,
            beside,
            sample,
        )

    def _state(
        self, parameter: torch.Tensor, held: torch.Tensor | None, group: Group
    ) -> torch.Tensor:
        """A float32 state with the parameter's layout: what is held already, as long as it is that."""
        if (
            held is not None
            and held.dtype is torch.float32
            and held.stride() == parameter.stride()
            and held.device == parameter.device
        ):
            return held
        made = torch.full_like(
            parameter,
            self._algorithm.initial(group),
            dtype=torch.float32,
            memory_format=torch.preserve_format,
        )
        return made if held is None else made.copy_(held)

    def _counters(
        self, own: torch.Tensor, state: dict[str, Any], *, begun: bool
    ) -> tuple[tuple[str, torch.Tensor], ...]:
        shown = []
        if self._algorithm.has_step_count:
            own[_STEPS] = state.get("step", 0)
            state["step"] = own[_STEPS]
            shown.append(("step", state["step"]))
        else:
            # Not shown: it only tells the first step, which starts a momentum, from the others.
            own[_STEPS] = float(begun)
        if self._masters.kind.master is Master.STOCHASTIC:
            own[_DRAWS] = state.get("draws", 0)
            state["draws"] = own[_DRAWS]
            shown.append(("draws", state["draws"]))
        return tuple(shown)


_DTYPE, _GRADIENT, _LAYOUT = attrgetter("dtype"), attrgetter("grad"), attrgetter("layout")
_held: Callable[[Any, Any], Any] = dict.get
_COEFFICIENTS = 12
_SIZES = 5
"""The row of numbers of elements."""


@dataclass(frozen=True)
class Launch:
    """Parameters of one dtype, kind of master, gradient dtype and variant, with what the kernel must know of them."""

    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    variant: bool
    """Which of the algorithm's two forms."""
    count: int
    """How many parameters."""
    chosen: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Picks its own among what is listed for all parameters."""
    addresses: torch.Tensor
    """int64 [9, parameters]: parameter, beside, three states, number of elements, first program,
    sample, its spacing."""
    sizes: torch.Tensor
    """Numbers of elements, a row of `addresses`."""
    chunks: torch.Tensor
    """int32 [2, programs]."""
    places: torch.Tensor
    """int32 [2, parameters]: place among the counters, group."""
    coefficients: torch.Tensor
    """float32 [12, parameters]: written before every update."""


@dataclass
class LaunchPlan:
    """Parameters with gradients, and the launches that update them."""

    slots: list[ParameterSlot]
    launches: tuple[Launch, ...]
    state: Any
    """The optimizer's state, whose tensors are in the tables; a loaded one is another object."""
    generation: int
    """Of what lies beside the parameters."""
    variants: tuple[bool, ...]
    """Of each group: momentum that is switched on needs a buffer."""
    dtypes: list[torch.dtype]
    """Of the gradients."""
    versions: list[int] = field(default_factory=list)
    """Of the parameters after the last step: who else wrote one has moved it."""

    def __post_init__(self) -> None:
        self.parameters = [slot.parameter for slot in self.slots]
        self._strides = [parameter.stride() for parameter in self.parameters]
        """Of gradients that need no copy."""
        self._at = [slot.address for slot in self.slots]
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
        """Tables for the next capture, outside the graph's memory pool. Whoever claims them
        takes them away: two uses cannot share a table."""
        self._claimed: list[tuple[list[torch.Tensor], tuple[int, ...]]] = []
        """Tables that the current capture reads, each with the addresses to fill in when it
        ends."""
        self._captured: list[Any] = []
        """What CUDA graphs read at every replay."""

    def fits(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        state: Any,
        generation: int,
        variants: tuple[bool, ...],
    ) -> bool:
        """Whether these parameters and gradients are those that tables were made for, and lie where they lay."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and state is self.state
            and generation == self.generation
            and variants == self.variants
            and list(map(_DTYPE, gradients)) == self.dtypes
            and set(map(_LAYOUT, gradients)) == {torch.strided}
            and list(map(torch.Tensor.data_ptr, parameters)) == self._at
            and all(map(is_, map(_held, self._dicts, self._names), self._tensors))
        )

    def lay_out(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give gradients the strides of their parameters, since the kernels read memory in order. A gradient that has others is replaced by a copy.

        The copy becomes `parameter.grad`: the check, step hooks and the update all see the same
        memory.
        """
        strides = list(map(torch.Tensor.stride, gradients))
        if strides == self._strides:
            return gradients
        moved = [
            (parameter, gradient)
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
            if not _same_order(parameter, gradient)
        ]
        if not moved:
            self._strides = strides
            return gradients
        for parameter, gradient in moved:
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        return list(map(_GRADIENT, self.parameters))

    def gradients_on(
        self, device: torch.device, gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The addresses of gradients, a table for each launch."""
        key = tuple(map(torch.Tensor.data_ptr, gradients))
        if _launch.is_capturing(device):
            return self._captured_tables(device, key)
        tables = self._tables.get(key)
        if tables is None:
            tables = [
                _launch.table_on(device, torch.tensor(launch.chosen(key), dtype=torch.int64))
                for launch in self.launches
            ]
            _launch.keep_recent(self._tables, key, tables)
        return tables

    def _captured_tables(self, device: torch.device, key: tuple[int, ...]) -> list[torch.Tensor]:
        """Tables for one use in a CUDA graph; their contents are valid from the first replay on."""
        if self._reserved:
            tables, self._reserved = self._reserved, []
            self._claimed.append((tables, key))
            return tables
        # A capture by hand, or a second use in one capture: the copies are captured too, and read
        # their pinned source at every replay.
        staged = [
            _launch.staged_on(device, torch.tensor(launch.chosen(key), dtype=torch.int64))
            for launch in self.launches
        ]
        self._captured.append(staged)
        return [table for table, _ in staged]

    def reserve(self) -> None:
        """Allocate tables for a capture."""
        self._reserved, self._claimed = (
            [
                torch.empty(launch.count, dtype=torch.int64, device=launch.addresses.device)
                for launch in self.launches
            ],
            [],
        )

    def settle(self) -> None:
        """Fill the tables of the capture that has just ended, and keep them for its replays."""
        for tables, key in self._claimed:
            for launch, table in zip(self.launches, tables, strict=True):
                addresses = torch.tensor(launch.chosen(key), dtype=torch.int64)
                table.copy_(_launch.pinned_for(table.device, addresses), non_blocking=True)
            self._captured.append(tables)
        self._reserved, self._claimed = [], []


def make_launches(
    slots: Sequence[ParameterSlot],
    dtypes: Sequence[torch.dtype],
    variants: Sequence[bool],
    chunk: int,
) -> tuple[Launch, ...]:
    """Sort parameters into launches. Groups with other hyper-parameters share one; what needs other code does not."""
    sorted_: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for place, (slot, dtype) in enumerate(zip(slots, dtypes, strict=True)):
        sorted_.setdefault((slot.parameter.dtype, dtype, variants[slot.group]), []).append(place)
    return tuple(
        _make_launch(kind, places, [slots[place] for place in places], chunk)
        for kind, places in sorted_.items()
    )


def _make_launch(
    kind: tuple[torch.dtype, torch.dtype, bool],
    places: Sequence[int],
    slots: Sequence[ParameterSlot],
    chunk: int,
) -> Launch:
    device = slots[0].parameter.device
    sizes = [slot.parameter.numel() for slot in slots]
    firsts = (
        torch.tensor([0, *(-(-size // chunk) for size in sizes)], dtype=torch.int64)
        .cumsum(0)
        .tolist()
    )
    rows = [_row(slot, first) for slot, first in zip(slots, firsts, strict=False)]
    addresses = _launch.table_on(device, torch.tensor(rows, dtype=torch.int64).T.contiguous())
    return Launch(
        *kind,
        len(slots),
        # Of one place itemgetter would give the bare item.
        itemgetter(*places) if len(places) > 1 else lambda listed: (listed[places[0]],),
        addresses,
        addresses[_SIZES],
        _launch.table_on(device, _launch.chunks_of(sizes, chunk)),
        _launch.table_on(
            device,
            torch.tensor(
                [[slot.index for slot in slots], [slot.group for slot in slots]], dtype=torch.int32
            ),
        ),
        torch.zeros(_COEFFICIENTS, len(slots), dtype=torch.float32, device=device),
    )


def _same_order(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order. The stride of a dimension of size 1 says nothing."""
    return all(
        size == 1 or one == other
        for size, one, other in zip(first.shape, first.stride(), second.stride(), strict=True)
    )


def _row(slot: ParameterSlot, first_program: int) -> Iterable[int]:
    states = [tensor.data_ptr() for _, tensor in slot.states]
    beside, sample = (
        0 if tensor is None else tensor.data_ptr() for tensor in (slot.companion, slot.sample)
    )
    numel = slot.parameter.numel()
    return [
        slot.parameter.data_ptr(),
        beside,
        *states,
        *[0] * (3 - len(states)),
        numel,
        first_program,
        sample,
        spacing(numel),
    ]
