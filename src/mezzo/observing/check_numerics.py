"""`mezzo.check_numerics`: find the op that makes a NaN or an infinite value, as it runs."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self
from weakref import WeakSet

import torch
from torch import Tensor

from mezzo._dtypes import dtype_name
from mezzo._errors import NumericsError, PolicyError, choices
from mezzo._torch import OpOverload, TorchDispatchMode, pytree
from mezzo.observing.op_places import OpPlace, PlaceTracker, compiled_code_as_written
from mezzo.policy.registry import registry

_NEVER = 2**62
"""Number of the first bad call of an op that has none."""


class NumericsMode(Enum):
    """What `check_numerics` does when an op makes a non-finite value."""

    ABORT = "abort"
    WARN = "warn"
    RECORD = "record"

    @classmethod
    def parse(cls, value: NumericsMode | str) -> NumericsMode:
        """Return the mode of a name; raise `PolicyError` if there is none."""
        known = [mode.value for mode in cls]
        if isinstance(value, cls) or value in known:
            return cls(value)
        raise PolicyError(f"mode={value!r} is not a mode of check_numerics. {choices(known)}")


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The values of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    low: float
    """The smallest finite value; NaN if there is none."""
    high: float
    nan: int
    """Number of NaN."""
    inf: int
    """Number of infinite values."""

    def __str__(self) -> str:
        bad = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "inf")) if count]
        values = "" if math.isnan(self.low) else f" from {self.low:.4g} to {self.high:.4g}"
        return f"{self.dtype}{list(self.shape)}{values}{', ' * bool(bad)}{' and '.join(bad)}"


@dataclass(frozen=True, slots=True)
class NonFiniteOp:
    """An op that made a non-finite value, or that first read one from outside of the block."""

    op: str
    """The torch function as policies name it, or the ATen op if no function called it."""
    aten: str
    """The ATen op, without its overload."""
    module: str
    """The path of the module; empty for the model itself and for code outside of it."""
    source: str
    """The file and line in the user's code, of a backward op those of its forward op."""
    backward: bool
    step: int
    """The step in which it happened first, from 1."""
    read: bool
    """Whether an input was non-finite already, and no op of the block had made it."""
    calls: int = 1
    """Calls with a non-finite value; more than 1 only if `mode="record"`."""
    output: TensorRange | None = None
    """The values of the output; None if `mode="record"`."""
    inputs: tuple[TensorRange, ...] = ()
    """The values of floating-point inputs; empty if `mode="record"`."""

    def __str__(self) -> str:
        name = self.op if self.op == self.aten else f"{self.op} ({self.aten})"
        what = "read a value that was not finite before" if self.read else "made a non-finite value"
        text = f"{name} {what}, in the {'backward' if self.backward else 'forward'} pass"
        text += f" of module {self.module!r}" if self.module else ""
        text += f" at {self.source}" if self.source else ""
        text += f", step {self.step}"
        text += f", {self.calls} calls" if self.calls > 1 else ""
        text += f". Output: {self.output}" if self.output is not None else ""
        inputs = "; ".join(f"{index}: {one}" for index, one in enumerate(self.inputs))
        return f"{text}. Inputs: {inputs}." if inputs else f"{text}."


@dataclass(frozen=True)
class _Filter:
    """Which ops are checked."""

    ops: tuple[str, ...] | None
    skip_ops: tuple[str, ...]
    modules: tuple[str, ...] | None
    skip_modules: tuple[str, ...]
    backward: bool

    def allows(self, names: Sequence[str], place: OpPlace) -> bool:
        if place.backward and not self.backward:
            return False
        if self.ops is not None and not _any_matches(names, self.ops):
            return False
        if self.modules is not None and not _any_contains(self.modules, place.module):
            return False
        return not (
            _any_matches(names, self.skip_ops) or _any_contains(self.skip_modules, place.module)
        )


def check_numerics(
    model: Any = None,
    mode: NumericsMode | str = NumericsMode.ABORT,
    *,
    ops: Iterable[str] | str | None = None,
    skip_ops: Iterable[str] | str = (),
    modules: Iterable[str] | str | None = None,
    skip_modules: Iterable[str] | str = (),
    steps: Container[int] | None = None,
    backward: bool = True,
) -> NumericsCheck:
    """Check the result of every op in a block for NaN and infinite values.

    An op is reported if it makes such a value from finite inputs, makes NaN of infinite ones, or
    reads one that no op of the block has made: NaN and plus infinity in parameters and data. Values
    that are passed on are not reported again, nor are masks, which are filled with infinity on
    purpose. With a loss scale that grows, overflows in backward are normal: pass `backward=False`.

    `"abort"` raises `NumericsError` at the op, with module, line and ranges of the inputs; `"warn"`
    warns once per op and module. Both synchronize at each op on CUDA. `"record"` does not: flags
    stay on the device until `findings` is read or the block ends, and there are no ranges.

    Random numbers are drawn as without the check. In the block steps run eagerly and compiled code
    runs as it is written. Each `with` block is one step; in a block around a loop, call
    `next_step()` at the end of each.

    Args:
        model: Names the modules: a model, a list of models, a `TrainStep`, an `EvalStep` or a
            converted model.
        mode: `"abort"`, `"warn"` or `"record"`.
        ops: Names of the ops to check, as globs: of torch functions as policies name them
            (`"softmax"`), or of ATen ops. All if None.
        skip_ops: Names of ops that are not checked.
        modules: Paths of the modules to check with all that is in them, as globs. All if None.
        skip_modules: Paths of modules that are not checked.
        steps: Numbers of the steps to check, from 1: `range(100, 200)`. All if None.
        backward: Whether ops of the backward pass are checked.

    >>> import mezzo
    >>> with mezzo.check_numerics(mode="record") as check:
    ...     _ = torch.tensor([-1.0, 4.0]).sqrt().sum()
    >>> [(found.op, found.calls) for found in check.findings]
    [('sqrt', 1)]
    """
    chosen = _Filter(
        None if ops is None else _names(ops, "ops"),
        _names(skip_ops, "skip_ops"),
        None if modules is None else _names(modules, "modules"),
        _names(skip_modules, "skip_modules"),
        backward,
    )
    if steps is not None and not isinstance(steps, Container):
        raise PolicyError(f"steps={steps!r} is no range of steps. Pass range(1, 11), or {{1, 5}}.")
    return NumericsCheck(PlaceTracker(model, sources=True), NumericsMode.parse(mode), chosen, steps)


class NumericsCheck:
    """A check of the numerics of ops; see `mezzo.check_numerics`."""

    def __init__(
        self,
        tracker: PlaceTracker,
        mode: NumericsMode,
        chosen: _Filter,
        steps: Container[int] | None,
    ) -> None:
        self._tracker, self._steps = tracker, steps
        self._recorder = _Recorder() if mode is NumericsMode.RECORD else _Reporter(mode)
        self._filter = chosen
        self._step = 0
        self._mode: _CheckingMode | None = None
        self._stack: ExitStack | None = None

    def start(self) -> None:
        """Begin the next step and check its ops; `with` does this."""
        if self._stack is not None:
            raise RuntimeError("This check is running. Call stop() before, or next_step().")
        self._step += 1
        with ExitStack() as stack:
            if self._is_checked():
                self._recorder.start_step(self._step)
                self._tracker.start()
                stack.callback(self._tracker.stop)
                stack.enter_context(compiled_code_as_written())
                stack.enter_context(self._tracker.functions)
                self._mode = _CheckingMode(self._tracker, self._filter, self._recorder)
                stack.enter_context(self._mode)
            self._stack = stack.pop_all()

    def next_step(self) -> None:
        """Begin the next step of a block around a loop."""
        self._step += 1
        if self._mode is not None:
            self._mode.active = self._is_checked()
            self._recorder.start_step(self._step)

    def stop(self) -> None:
        """Stop checking and remove all hooks. Findings stay."""
        stack, self._stack, self._mode = self._stack, None, None
        if stack is not None:
            stack.close()

    def _is_checked(self) -> bool:
        return self._steps is None or self._step in self._steps

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def findings(self) -> tuple[NonFiniteOp, ...]:
        """The ops that made or read non-finite values, in the order of their first such call.

        Synchronizes if `mode="record"`.
        """
        return self._recorder.findings()

    def __str__(self) -> str:
        found = self.findings
        return "\n".join(map(str, found)) if found else "No op made a non-finite value."


# -- one op ----------------------------------------------------------------------------------------


class _Flags(NamedTuple):
    """Whether tensors contain NaN or infinite values, as bool tensors."""

    nan: Tensor
    inf: Tensor


class _Op(NamedTuple):
    """An op that has run."""

    name: str
    aten: str
    place: OpPlace
    inputs: list[Tensor]
    outputs: list[Tensor]
    unknown: list[Tensor]
    """Inputs that no checked op has made."""
    before: _Flags | None
    """The flags of the inputs before an op that writes to them."""
    fills: bool
    """Whether it was called with a non-finite number on purpose."""

    def made(self) -> Tensor:
        """Return whether the op made a non-finite value that no input explains."""
        if self.fills:
            return self.outputs[0].new_zeros((), dtype=torch.bool)
        results = _flags(self.outputs)
        given = self.before or (_flags(self.inputs) if self.inputs else None)
        if given is None:
            return results.nan | results.inf
        return (results.nan & ~given.nan) | (results.inf & ~(given.inf | given.nan))

    def read(self) -> Tensor | None:
        """Return whether an input from outside has NaN or plus infinity; None if there is none.

        Minus infinity masks logits, and tensors without dimensions are constants.
        """
        found = [
            one.isnan().any() | one.isposinf().any()
            for one in self.unknown
            if one.device == self.unknown[0].device
        ]
        return torch.stack(found).any() if found else None


class _CheckingMode(TorchDispatchMode):
    def __init__(
        self, tracker: PlaceTracker, chosen: _Filter, recorder: _Recorder | _Reporter
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = True
        self._tracker, self._filter, self._recorder = tracker, chosen, recorder
        self._known: WeakSet[Any] = WeakSet()
        """Storages that checked ops have read or written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, OpOverload) or func.is_view:
            return func(*args, **kwargs)
        place, aten = self._tracker.place(), func.overloadpacket.__name__
        name = place.function or registry().name_of(func) or aten
        if not self._filter.allows((name, aten, registry().name_of(func) or aten), place):
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = [one for one in leaves if _is_checkable(one)]
        unknown = [one for one in inputs if one.dim() and one.untyped_storage() not in self._known]
        writes = func._schema.is_mutable
        before = _flags(inputs) if writes and inputs else None
        fills = any(isinstance(one, float) and not math.isfinite(one) for one in leaves)
        ranges = self._recorder.ranges(inputs) if writes else ()
        result = func(*args, **kwargs)
        outputs = [one for one in pytree.tree_leaves(result) if _is_checkable(one)]
        outputs = outputs or (inputs if writes else [])
        self._known.update(one.untyped_storage() for one in (*inputs, *outputs))
        if aten.startswith("_scaled_dot_product_") and not place.backward:
            # The logarithms of sums beside it are minus infinity in masked rows.
            outputs = outputs[:1]
        if outputs and not aten.startswith(("empty", "new_empty")):
            op = _Op(name, aten, place, inputs, outputs, [] if writes else unknown, before, fills)
            self._recorder.add(op, ranges)
        return result


# -- report at the op ------------------------------------------------------------------------------


class _Reporter:
    """Raises or warns when an op makes a non-finite value. Reads the device at each op."""

    def __init__(self, mode: NumericsMode) -> None:
        self._mode = mode
        self._step = 0
        self._found: dict[tuple[str, str, bool, bool], NonFiniteOp] = {}

    def start_step(self, step: int) -> None:
        self._step = step

    @staticmethod
    def ranges(tensors: list[Tensor]) -> tuple[TensorRange, ...]:
        return tuple(map(tensor_range, tensors))

    def add(self, op: _Op, ranges: tuple[TensorRange, ...]) -> None:
        read = op.read()
        is_read = read is not None and bool(read)
        if not is_read and not bool(op.made()):
            return
        key = (op.aten, op.place.module, op.place.backward, is_read)
        if self._mode is NumericsMode.WARN and key in self._found:
            return
        bad = next((one for one in op.outputs if not bool(one.isfinite().all())), op.outputs[0])
        found = replace(
            _finding(op, self._step, read=is_read),
            output=tensor_range(bad),
            inputs=ranges or self.ranges(op.inputs),
        )
        self._found[key] = found
        if self._mode is NumericsMode.ABORT:
            raise NumericsError(str(found), found)
        warnings.warn(str(found), UserWarning, stacklevel=4)

    def findings(self) -> tuple[NonFiniteOp, ...]:
        return tuple(self._found.values())


# -- record on the device --------------------------------------------------------------------------


@dataclass
class _Record:
    """Counts of one op in one module, on the device."""

    finding: NonFiniteOp
    calls: Tensor
    first: Tensor
    """Number of the first bad call, counted over all ops."""

    def add(self, bad: Tensor, number: int) -> None:
        self.calls += bad
        torch.minimum(self.first, ~bad * _NEVER + number, out=self.first)


class _Recorder:
    """Counts bad calls on the device, without a host read."""

    def __init__(self) -> None:
        self._records: dict[Any, _Record] = {}
        self._calls = 0
        self._starts = [0]
        """Number of the first call of each step."""
        self._steps = [0]

    def start_step(self, step: int) -> None:
        self._starts.append(self._calls)
        self._steps.append(step)

    @staticmethod
    def ranges(_: list[Tensor]) -> tuple[TensorRange, ...]:
        return ()

    def add(self, op: _Op, _: tuple[TensorRange, ...]) -> None:
        self._calls += 1
        read, made = op.read(), op.made()
        if read is not None:
            self._add(op, read, read=True)
            made = made & ~read
        self._add(op, made, read=False)

    def _add(self, op: _Op, bad: Tensor, *, read: bool) -> None:
        key = (op.aten, op.place.module, op.place.backward, read, bad.device)
        record = self._records.get(key)
        if record is None:
            calls = torch.zeros((), dtype=torch.int64, device=bad.device)
            record = _Record(_finding(op, 0, read=read), calls, calls + _NEVER)
            self._records[key] = record
        record.add(bad, self._calls)

    def findings(self) -> tuple[NonFiniteOp, ...]:
        records = list(self._records.values())
        by_device: dict[torch.device, list[_Record]] = {}
        for record in records:
            by_device.setdefault(record.calls.device, []).append(record)
        found: list[tuple[int, NonFiniteOp]] = []
        for same in by_device.values():
            values = torch.stack([one for record in same for one in (record.calls, record.first)])
            calls_and_first = values.reshape(-1, 2).tolist()
            for record, (calls, first) in zip(same, calls_and_first, strict=True):
                if calls:
                    step = self._steps[bisect_right(self._starts, first - 1) - 1]
                    found.append((first, replace(record.finding, calls=calls, step=step)))
        return tuple(finding for _, finding in sorted(found, key=lambda one: one[0]))


# -- values ----------------------------------------------------------------------------------------


def tensor_range(tensor: Tensor) -> TensorRange:
    """Return the range of a floating-point tensor. This synchronizes.

    >>> print(tensor_range(torch.tensor([1.0, -2.0, torch.inf])))
    float32[3] from -2 to 1, 1 inf
    """
    values = tensor.detach()
    finite = values[values.isfinite()].float()
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (math.nan,) * 2
    return TensorRange(
        dtype_name(values.dtype),
        tuple(values.shape),
        low,
        high,
        int(values.isnan().sum()),
        int(values.isinf().sum()),
    )


def _finding(op: _Op, step: int, *, read: bool) -> NonFiniteOp:
    place = op.place
    return NonFiniteOp(
        op.name, op.aten, place.module, place.source, place.backward, step=step, read=read
    )


def _flags(tensors: list[Tensor]) -> _Flags:
    values = [one.detach() for one in tensors]
    nan, inf = values[0].isnan().any(), values[0].isinf().any()
    for one in values[1:]:
        # Optimizers pass steps on the host beside parameters on a device.
        if one.device == nan.device:
            nan, inf = nan | one.isnan().any(), inf | one.isinf().any()
    return _Flags(nan, inf)


def _is_checkable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.numel() > 0
        and value.device.type != "meta"
    )


def _names(value: Iterable[str] | str, argument: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise PolicyError(f"{argument} takes names as strings, got {name!r}. Pass ['softmax'].")
    return names


def _any_matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _any_contains(patterns: Sequence[str], path: str) -> bool:
    parts = path.split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return _any_matches(prefixes, patterns)
