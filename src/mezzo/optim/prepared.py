"""What the fused step works out once for a set of parameters with gradients: tables of addresses, by launch.

From step to step the same set comes back, with gradients elsewhere. Whether it does is asked in loops that run in C: for 150 parameters a loop in Python would take
longer than the GPU takes for the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from mezzo.optim.samples import spacing
from mezzo.optim.slots import Slot
from mezzo.scaling import copies, kernels

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
    """int64 [9, parameters]: parameter, beside, three states, number of elements, first program, sample, its spacing."""
    sizes: torch.Tensor
    """Numbers of elements, a row of `addresses`."""
    chunks: torch.Tensor
    """int32 [2, programs]."""
    places: torch.Tensor
    """int32 [2, parameters]: place among the counters, group."""
    coefficients: torch.Tensor
    """float32 [12, parameters]: written before every update."""


@dataclass
class Prepared:
    """Parameters with gradients, and the launches that update them."""

    slots: list[Slot]
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
            (self.state[slot.parameter], name, tensor) for slot in self.slots for name, tensor in (*slot.states, *slot.counters)
        ]
        self._dicts, self._names, self._tensors = ([entry[row] for entry in entries] for row in range(3))
        self._tables: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._reserved: list[torch.Tensor] = []
        """Tables for the next capture, outside the graph's memory pool. Whoever claims them takes them away: two uses cannot share a table."""
        self._claimed: list[tuple[list[torch.Tensor], tuple[int, ...]]] = []
        """Tables that the current capture reads, each with the addresses to fill in when it ends."""
        self._captured: list[Any] = []
        """What CUDA graphs read at every replay."""

    def fits(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], state: Any, generation: int, variants: tuple[bool, ...]) -> bool:
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

        The copy becomes `parameter.grad`: the check, step hooks and the update all see the same memory.
        """
        strides = list(map(torch.Tensor.stride, gradients))
        if strides == self._strides:
            return gradients
        moved = [(parameter, gradient) for parameter, gradient in zip(self.parameters, gradients, strict=True) if not _same_order(parameter, gradient)]
        if not moved:
            self._strides = strides
            return gradients
        for parameter, gradient in moved:
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        return list(map(_GRADIENT, self.parameters))

    def gradients_on(self, device: torch.device, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The addresses of gradients, a table for each launch."""
        key = tuple(map(torch.Tensor.data_ptr, gradients))
        if copies.capturing(device):
            return self._captured_tables(device, key)
        tables = self._tables.get(key)
        if tables is None:
            tables = [kernels.table_on(device, torch.tensor(launch.chosen(key), dtype=torch.int64)) for launch in self.launches]
            kernels.keep(self._tables, key, tables)
        return tables

    def _captured_tables(self, device: torch.device, key: tuple[int, ...]) -> list[torch.Tensor]:
        """Tables for one use in a CUDA graph; their contents are valid from the first replay on."""
        if self._reserved:
            tables, self._reserved = self._reserved, []
            self._claimed.append((tables, key))
            return tables
        # A capture by hand, or a second use in one capture: the copies are captured too, and read their pinned source at every replay.
        staged = [kernels.staged_on(device, torch.tensor(launch.chosen(key), dtype=torch.int64)) for launch in self.launches]
        self._captured.append(staged)
        return [table for table, _ in staged]

    def reserve(self) -> None:
        """Allocate tables for a capture."""
        self._reserved, self._claimed = [torch.empty(launch.count, dtype=torch.int64, device=launch.addresses.device) for launch in self.launches], []

    def settle(self) -> None:
        """Fill the tables of the capture that has just ended, and keep them for its replays."""
        for tables, key in self._claimed:
            for launch, table in zip(self.launches, tables, strict=True):
                addresses = torch.tensor(launch.chosen(key), dtype=torch.int64)
                table.copy_(kernels.pinned_for(table.device, addresses), non_blocking=True)
            self._captured.append(tables)
        self._reserved, self._claimed = [], []


def make_launches(slots: Sequence[Slot], dtypes: Sequence[torch.dtype], variants: Sequence[bool], chunk: int) -> tuple[Launch, ...]:
    """Sort parameters into launches. Groups with other hyper-parameters share one; what needs other code does not."""
    sorted_: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for place, (slot, dtype) in enumerate(zip(slots, dtypes, strict=True)):
        sorted_.setdefault((slot.parameter.dtype, dtype, variants[slot.group]), []).append(place)
    return tuple(_make_launch(kind, places, [slots[place] for place in places], chunk) for kind, places in sorted_.items())


def _make_launch(kind: tuple[torch.dtype, torch.dtype, bool], places: Sequence[int], slots: Sequence[Slot], chunk: int) -> Launch:
    device = slots[0].parameter.device
    sizes = [slot.parameter.numel() for slot in slots]
    firsts = torch.tensor([0, *(-(-size // chunk) for size in sizes)], dtype=torch.int64).cumsum(0).tolist()
    rows = [_row(slot, first) for slot, first in zip(slots, firsts, strict=False)]
    addresses = kernels.table_on(device, torch.tensor(rows, dtype=torch.int64).T.contiguous())
    return Launch(
        *kind,
        len(slots),
        # Of one place itemgetter would give the bare item.
        itemgetter(*places) if len(places) > 1 else lambda listed: (listed[places[0]],),
        addresses,
        addresses[_SIZES],
        kernels.table_on(device, kernels.chunks_of(sizes, chunk)),
        kernels.table_on(device, torch.tensor([[slot.place for slot in slots], [slot.group for slot in slots]], dtype=torch.int32)),
        torch.zeros(_COEFFICIENTS, len(slots), dtype=torch.float32, device=device),
    )


def _same_order(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order. The stride of a dimension of size 1 says nothing."""
    return all(size == 1 or one == other for size, one, other in zip(first.shape, first.stride(), second.stride(), strict=True))


def _row(slot: Slot, first_program: int) -> Iterable[int]:
    states = [tensor.data_ptr() for _, tensor in slot.states]
    beside, sample = (0 if tensor is None else tensor.data_ptr() for tensor in (slot.beside, slot.sample))
    numel = slot.parameter.numel()
    return [slot.parameter.data_ptr(), beside, *states, *[0] * (3 - len(states)), numel, first_program, sample, spacing(numel)]
