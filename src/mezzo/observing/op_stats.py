"""`mezzo.op_stats`: the ops that run, by module and dtype, with the casts around them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mezzo._dtypes import dtype_name
from mezzo._errors import MEZZO_FOLDER
from mezzo._torch import (
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    sequence_number,
)
from mezzo.observing.op_places import Observation, PlaceTracker, leaves_of
from mezzo.observing.op_stats_table import COUNTS, OpRow, format_table
from mezzo.observing.records import OpsRecord, Record

_CAST_FUNCTIONS = frozenset(
    "to float half bfloat16 double type type_as cpu cuda copy_ _to_copy".split()
)
"""Names of the functions that a user casts with."""
_CASTS = frozenset({"_to_copy", "copy_", "copy"})
_UNCOUNTED = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh")
"""Beginnings of the names of ops that compute nothing, besides views."""


def op_stats(model: Any = None, *, time: bool = False) -> OpStats:
    """Count the ops that run in a block, by module, op and dtype, with the casts around them.

    `print` shows a table, `rows` are the counts as records. Forward and backward ops are counted,
    views and ops that only allocate memory are not. A call of a `TrainStep` or an `EvalStep` in the
    block runs eagerly, compiled code runs as it is written: these are the ops of the program, with
    their dtypes, before Inductor fuses them. Kernels that are no ATen ops, such as mezzo's fused
    optimizer steps, are not seen. Each op takes about 20 µs more: use it for a step, not for a
    whole run. A block can be entered again and adds to the counts.

    Args:
        model: Names the modules: a model, a list of models, a `TrainStep`, an `EvalStep` or a
            converted model. Without it all ops count under the module "".
        time: Measure the time of each op too. On CUDA between events, which includes gaps between
            kernels when the host is slower than the device. Does not synchronize until it is read.

    >>> import mezzo
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    >>> with mezzo.op_stats(model) as ops, mezzo.autocast("cpu", dtype="bfloat16"):
    ...     _ = model(torch.ones(2, 4))
    >>> [(row.module, row.op, row.dtype, row.casts_in) for row in ops.rows if row.op != "_to_copy"]
    [('', 'ones', 'float32', 0), ('0', 'addmm', 'bfloat16', 3), ('1', '_softmax', 'bfloat16', 0)]
    """
    return OpStats(model, time=time)


class OpStats:
    """Counts of the ops that ran in its blocks; see `mezzo.op_stats`.

    Can be read at any time, inside a block too.
    """

    def __init__(self, model: Any = None, *, time: bool = False) -> None:
        self._tracker = PlaceTracker(model)
        self._times = time
        self._counts: dict[_Key, _Counts] = {}
        self._observation: Observation | None = None

    # -- collect -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to count; `with` does this."""
        if self._observation is not None:
            raise RuntimeError("These op statistics are being collected. Call stop() before.")
        functions = _CastFunctions()
        mode = _CountingMode(self._counts, self._tracker, functions, times=self._times)
        observation = Observation()
        observation.start(self._tracker, functions, mode)
        self._observation = observation

    def stop(self) -> None:
        """Stop counting and remove all hooks. Counts stay."""
        if self._observation is not None:
            self._observation.stop()
        self._observation = None

    def clear(self) -> None:
        """Set all counts to zero."""
        self._counts.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- read --------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """One row per module, op and dtype, in the order in which they first ran.

        Synchronizes if times were measured on CUDA.
        """
        return tuple(
            OpRow(
                *key,
                **{name: getattr(counts, name) for name in COUNTS},
                microseconds=counts.microseconds() if self._times else None,
            )
            for key, counts in list(self._counts.items())
        )

    def of(self, op: str) -> dict[str, int]:
        """Return the calls of an op by dtype; empty if it did not run."""
        return _sum_calls(row for row in self.rows if row.op == op)

    def by_dtype(self) -> dict[str, int]:
        """Return the calls of all ops by dtype."""
        return _sum_calls(self.rows)

    def table(self, depth: int = 0) -> str:
        """Return the counts as a table, summed over modules below `depth` levels of the model.

        `depth=0` sums over the whole model, `depth=1` has rows for each child of the model.
        """
        return format_table(self.rows, depth)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"OpStats(calls={sum(row.calls for row in self.rows)}, rows={len(self._counts)})"


class _Key(NamedTuple):
    """What calls are counted by."""

    module: str
    op: str
    dtype: str


@dataclass
class _Counts:
    """Counts of one op with one dtype in one module: the fields `COUNTS` of its `OpRow`."""

    calls: int = 0
    casts_in: int = 0
    casts_out: int = 0
    cast_bytes: int = 0
    casts: int = 0
    inserted: int = 0
    seconds: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Before and after each call on CUDA, read when the time is."""

    def add_cast(self, cast_bytes: int, *, inserted: bool) -> None:
        """Note that the last call is a cast, which mezzo has inserted or not."""
        self.cast_bytes += cast_bytes
        self.casts += 1
        self.inserted += inserted

    def add_output_cast(self, cast_bytes: int) -> None:
        """Note that an output is cast."""
        self.casts_out += 1
        self.cast_bytes += cast_bytes

    def add_input_cast(self, cast_bytes: int) -> None:
        """Note that an input was cast."""
        self.casts_in += 1
        self.cast_bytes += cast_bytes

    def add_call(self) -> None:
        """Count a call."""
        self.calls += 1

    def add_seconds(self, seconds: float) -> None:
        """Add the time of a call on a CPU."""
        self.seconds += seconds

    def microseconds(self) -> float:
        for start, end in self.events:
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1e3
        self.events.clear()
        return self.seconds * 1e6


class _Origin(NamedTuple):
    """What wrote a tensor."""

    counts: _Counts
    cast_bytes: int
    """Bytes that the cast read and wrote; 0 if it was no cast, or is counted."""


class _CastFunctions(TorchFunctionMode):
    """Follows whether the user's code casts a tensor now: other casts are made by autocast."""

    is_user_cast = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _CAST_FUNCTIONS:
            return func(*args, **(kwargs or {}))
        before = self.is_user_cast
        # mezzo's own casts, of function modes and of the inputs of a decorated model.
        self.is_user_cast = not sys._getframe(1).f_code.co_filename.startswith(MEZZO_FOLDER)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_user_cast = before


class _CountingMode(TorchDispatchMode):
    """Counts every op that runs, and follows which tensors are results of casts."""

    def __init__(
        self,
        counts: dict[_Key, _Counts],
        tracker: PlaceTracker,
        functions: _CastFunctions,
        *,
        times: bool,
    ) -> None:
        super().__init__()
        self._counts, self._tracker, self._functions, self._times = (
            counts,
            tracker,
            functions,
            times,
        )
        self._user_casts: set[int] = set()
        """Numbers of the autograd nodes of casts in the user's code."""
        # Views share the storage of what they view.
        self._origins: WeakKeyDictionary[Any, _Origin] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Higher-order operators call functions, whose ops come here one by one.
        if not isinstance(func, OpOverload) or func.is_view:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__.startswith(_UNCOUNTED):
            return func(*args, **kwargs)
        # Before the op runs: afterwards its autograd node may not be the newest.
        module = self._tracker.place().module
        inputs = _tensors((*args, *kwargs.values()))
        if not self._times:
            result = func(*args, **kwargs)
            self._count(module, func, inputs, result)
            return result
        timer = _Timer(inputs)
        result = func(*args, **kwargs)
        timer.stop(self._count(module, func, inputs, result))
        return result

    def _count(self, module: str, func: Any, inputs: list[Tensor], result: Any) -> _Counts | None:
        """Count one call; return None if it wrote no tensor."""
        outputs, op = _tensors((result,)), func.overloadpacket.__name__
        if not outputs and func._schema.is_mutable:  # as the ops on lists of tensors
            outputs = inputs[:1]
        if not outputs:
            return None
        # A norm returns its output before its float32 statistics.
        first = next((output for output in outputs if output.is_floating_point()), outputs[0])
        key = _Key(module, op, dtype_name(first.dtype))
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts()
        counts.add_call()
        cast = _cast_bytes(op, inputs, first)
        if cast:
            counts.add_cast(cast, inserted=not self._is_user_cast())
            self._count_output_cast(inputs[-1], cast)
        else:
            self._count_input_casts(inputs, counts)
        for output in outputs:
            self._origins[output.untyped_storage()] = _Origin(counts, cast)
        return counts

    def _is_user_cast(self) -> bool:
        """Return whether the user's code casts; in backward, whether it did in forward."""
        node = current_autograd_node()
        if node is not None:
            return sequence_number(node) in self._user_casts
        if self._functions.is_user_cast:
            self._user_casts.add(next_sequence_number() - 1)
        return self._functions.is_user_cast

    def _count_output_cast(self, tensor: Tensor, cast_bytes: int) -> None:
        origin = self._origins.get(tensor.untyped_storage())
        if origin is not None and not origin.cast_bytes:
            origin.counts.add_output_cast(cast_bytes)

    def _count_input_casts(self, inputs: list[Tensor], counts: _Counts) -> None:
        for tensor in inputs:
            origin = self._origins.get(storage := tensor.untyped_storage())
            if origin is not None and origin.cast_bytes:
                counts.add_input_cast(origin.cast_bytes)
                # The next op that reads it needs no cast of its own.
                self._origins[storage] = _Origin(origin.counts, 0)


class _Timer:
    """Measures one op, on CUDA with events."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if any(input_.is_cuda for input_ in inputs):
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record()
        self._start = perf_counter()

    def stop(self, counts: _Counts | None) -> None:
        seconds = perf_counter() - self._start
        if counts is None:
            return
        if self._events is None:
            counts.add_seconds(seconds)
        else:
            self._events[1].record()
            counts.events.append(self._events)


def _cast_bytes(op: str, inputs: list[Tensor], output: Tensor) -> int:
    """Return the bytes that a cast between floating-point dtypes reads and writes; else 0."""
    if op not in _CASTS or not output.is_floating_point() or not inputs:
        return 0
    source = inputs[-1]
    if source.dtype == output.dtype or not source.is_floating_point():
        return 0
    return source.numel() * source.element_size() + output.numel() * output.element_size()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in arguments or results that have a storage."""
    return [
        leaf
        for leaf in leaves_of(values)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]


def _sum_calls(rows: Iterable[OpRow]) -> dict[str, int]:
    calls: dict[str, int] = {}
    for row in rows:
        calls[row.dtype] = calls.get(row.dtype, 0) + row.calls
    return calls


# -- in an observed run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledOps:
    """Op statistics of one step: `rows`, or print it."""

    rows: tuple[OpRow, ...] = ()

    def table(self, depth: int = 0) -> str:
        """Return the table, summed over modules below `depth` levels of the model."""
        return format_table(self.rows, depth) if self.rows else "No step was sampled yet."

    def __str__(self) -> str:
        return self.table()


class OpSampler:
    """Counts the ops of a sampled step."""

    def __init__(self, models: Any) -> None:
        self._stats = OpStats(models)
        self._step = 0
        self._is_new = False
        self.latest = SampledOps()
        """The ops of the last sampled step."""

    def start(self, step: int) -> None:
        """Begin to count the ops of a step."""
        self._step = step
        self._stats.clear()
        self._stats.start()

    def stop(self) -> None:
        """Stop counting, and keep the counts."""
        self._stats.stop()
        self.latest, self._is_new = SampledOps(self._stats.rows), True

    def take(self, time: float) -> list[Record]:
        """Return the record of the last sampled step, once."""
        if not self._is_new:
            return []
        self._is_new = False
        rows = tuple(asdict(row) for row in self.latest.rows)
        return [OpsRecord(step=self._step, time=time, rows=rows)]
