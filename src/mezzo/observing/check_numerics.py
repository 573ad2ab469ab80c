"""`mezzo.check_numerics`: find the op that makes a NaN or an infinite value, as it runs."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from mezzo._errors import NumericsError, PolicyError, choices
from mezzo.observing.checking_mode import (
    CheckedOp,
    CheckingMode,
    OpFilter,
    Recorder,
    call_after,
)
from mezzo.observing.nonfinite import NonFiniteOp, TensorRange, tensor_range
from mezzo.observing.op_places import Observation, PlaceTracker
from mezzo.observing.user_lines import user_line_level

_NEVER = 2**62
"""Number of the first bad call of an op without a bad call."""


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
    chosen = OpFilter(
        None if ops is None else _names(ops, "ops"),
        _names(skip_ops, "skip_ops"),
        None if modules is None else _names(modules, "modules"),
        _names(skip_modules, "skip_modules"),
        backward,
    )
    if steps is not None and not isinstance(steps, Container):
        raise PolicyError(f"steps={steps!r} is no range of steps. Pass range(1, 11), or {{1, 5}}.")
    mode = NumericsMode.parse(mode)
    recorder = _Recorder() if mode is NumericsMode.RECORD else _Reporter(mode)
    return NumericsCheck(PlaceTracker(model, sources=True), recorder, chosen, steps)


class NumericsCheck:
    """A check of the numerics of ops; see `mezzo.check_numerics`."""

    def __init__(
        self,
        tracker: PlaceTracker,
        recorder: Recorder,
        chosen: OpFilter,
        steps: Container[int] | None = None,
    ) -> None:
        self._tracker, self._recorder = tracker, recorder
        self._filter, self._steps = chosen, steps
        self._step = 0
        self._mode: CheckingMode | None = None
        self._observation: Observation | None = None

    def start(self) -> None:
        """Begin the next step and check its ops; `with` does this."""
        if self._observation is not None:
            raise RuntimeError("This check is running. Call stop() before, or next_step().")
        self._step += 1
        self._observation = Observation()
        if self._is_checked():
            self._recorder.start_step(self._step)
            self._mode = CheckingMode(self._tracker, self._filter, self._recorder)
            self._observation.start(self._tracker, self._tracker.functions, self._mode)

    def next_step(self) -> None:
        """Begin the next step of a block around a loop."""
        self._step += 1
        if self._mode is not None:
            self._mode.switch(is_on=self._is_checked())
            self._recorder.start_step(self._step)

    def stop(self) -> None:
        """Stop checking and remove all hooks. Findings stay."""
        if self._observation is not None:
            self._observation.stop()
        self._observation = self._mode = None

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

    def add(self, op: CheckedOp, ranges: tuple[TensorRange, ...]) -> None:
        read = op.read()
        is_read = read is not None and bool(read)
        if not is_read and not bool(op.made()):
            return
        key = (op.aten, op.place.module, op.place.backward, is_read)
        if self._mode is NumericsMode.WARN and key in self._found:
            return
        bad = next(
            (output for output in op.outputs if not bool(output.isfinite().all())), op.outputs[0]
        )
        found = replace(
            _finding(op, self._step, read=is_read),
            output=tensor_range(bad),
            inputs=ranges or self.ranges(op.inputs),
        )
        if op.node is None:
            self._report(key, found)
        else:
            call_after(op.node, lambda is_bad: self._report(key, found) if is_bad else None)

    def _report(self, key: tuple[str, str, bool, bool], found: NonFiniteOp) -> None:
        if self._mode is NumericsMode.WARN and key in self._found:
            return
        self._found[key] = found
        if self._mode is NumericsMode.ABORT:
            raise NumericsError(str(found), found)
        warnings.warn(str(found), UserWarning, stacklevel=user_line_level())

    def findings(self) -> tuple[NonFiniteOp, ...]:
        return tuple(self._found.values())


# -- record on the device --------------------------------------------------------------------------


@dataclass
class _Record:
    """Counts of one op at one place, on the device."""

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

    def add(self, op: CheckedOp, _: tuple[TensorRange, ...]) -> None:
        self._calls += 1
        number, read, made = self._calls, op.read(), op.made()
        if op.node is None:
            self._add_both(op, read, made, number)
        else:
            call_after(
                op.node,
                lambda is_bad: self._add_both(
                    op, None if read is None else read & is_bad, made & is_bad, number
                ),
            )

    def _add_both(self, op: CheckedOp, read: Tensor | None, made: Tensor, number: int) -> None:
        if read is not None:
            self._add(op, read, number, read=True)
            made = made & ~read
        self._add(op, made, number, read=False)

    def _add(self, op: CheckedOp, bad: Tensor, number: int, *, read: bool) -> None:
        key = (op.aten, op.place, read, bad.device)
        record = self._records.get(key)
        if record is None:
            calls = torch.zeros((), dtype=torch.int64, device=bad.device)
            record = _Record(_finding(op, 0, read=read), calls, calls + _NEVER)
            self._records[key] = record
        record.add(bad, number)

    def findings(self) -> tuple[NonFiniteOp, ...]:
        records = list(self._records.values())
        by_device: dict[torch.device, list[_Record]] = {}
        for record in records:
            by_device.setdefault(record.calls.device, []).append(record)
        found: list[tuple[int, NonFiniteOp]] = []
        for same in by_device.values():
            values = torch.stack(
                [tensor for record in same for tensor in (record.calls, record.first)]
            )
            calls_and_first = values.reshape(-1, 2).tolist()
            for record, (calls, first) in zip(same, calls_and_first, strict=True):
                if calls:
                    step = self._steps[bisect_right(self._starts, first - 1) - 1]
                    found.append((first, replace(record.finding, calls=calls, step=step)))
        return tuple(finding for _, finding in sorted(found, key=lambda entry: entry[0]))


# -- arguments -------------------------------------------------------------------------------------


def _finding(op: CheckedOp, step: int, *, read: bool) -> NonFiniteOp:
    place = op.place
    return NonFiniteOp(
        op.name, op.aten, place.module, place.source, place.backward, step=step, read=read
    )


def _names(value: Iterable[str] | str, argument: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise PolicyError(f"{argument} takes names as strings, got {name!r}. Pass ['softmax'].")
    return names
