"""`mezzo.record_values`: fingerprints of the results of all ops of a batch, written to a log."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._dtypes import dtype_name
from mezzo._torch import pytree
from mezzo.observing.finding import Finding, Kind, NamedTensor
from mezzo.observing.function_places import FunctionPlaces, Pausable, function_name
from mezzo.observing.records import RunStarted
from mezzo.observing.replay import Replay
from mezzo.observing.replay_setup import replay_of
from mezzo.prepare.plan import PolicyArg

KIND = "values"
"""The kind of the record in a log."""
_SAMPLES = 16
"""Values of each result that are stored, at fixed positions."""
_CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
"""Not recorded: policies differ in their casts."""


@dataclass(frozen=True)
class Fingerprint:
    """The result of one op, or the gradient that reached it, in a few numbers."""

    module: str
    """The path of the module; the name of the parameter for its gradient."""
    op: str
    """The op as policies name it; `"parameter"` for the gradient of a parameter."""
    direction: str
    """`"forward"`, or `"backward"` for the gradient of the result."""
    index: int
    """How often this op was called in this module before."""
    line: str
    dtype: str
    count: int
    """Number of elements."""
    rms: float
    max: float
    """The largest absolute value."""
    mean: float
    sample: tuple[float, ...]
    """Values at fixed positions."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON has: infinities and NaN as strings."""
        fields = vars(self) | {"sample": [_plain(number) for number in self.sample]}
        return {
            name: _plain(value) if isinstance(value, float) else value
            for name, value in fields.items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Fingerprint:
        """Read the fields; unknown ones are ignored."""
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        numbers = {name: float(known[name]) for name in ("rms", "max", "mean")}
        return cls(**{**known, **numbers, "sample": tuple(map(float, known["sample"]))})


class ValueRecorder(Pausable, FunctionPlaces):
    """Takes the fingerprint of the result of every torch function, and of its gradient."""

    finding: Finding | None = None

    def __init__(
        self, modules: Mapping[str, nn.Module], caller: CodeType, named: Iterable[NamedTensor]
    ) -> None:
        super().__init__(modules, caller)
        self.values: list[Fingerprint] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        for named_tensor in named:
            if named_tensor.kind is Kind.PARAMETERS and named_tensor.tensor.requires_grad:
                self._watch(named_tensor.tensor, ("parameter", named_tensor.name, 0, ""))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        op, module = function_name(func), self.module
        leaves = [leaf for leaf in pytree.tree_leaves(result) if _is_value(leaf)]
        if op is None or op in _CASTS or not leaves or self.is_paused:
            return result
        index = self._calls[op, module]
        self._calls[op, module] += 1
        place = (op, module, index, self.source())
        self._add(leaves[0], "forward", place)
        if leaves[0].requires_grad:
            self._watch(leaves[0], place)
        return result

    def cause_of_error(self) -> None:
        """Return None: nothing is judged."""

    def outcome(self, results: Iterable[Tensor]) -> None:
        """Return None: nothing is judged."""

    def _watch(self, tensor: Tensor, place: tuple[str, str, int, str]) -> None:
        def record(gradient: Tensor) -> None:
            # The search for a loss scale runs backward too.
            if not self.is_paused and _is_value(gradient):
                self._add(gradient, "backward", place)

        tensor.register_hook(record)

    def _add(self, tensor: Tensor, direction: str, place: tuple[str, str, int, str]) -> None:
        op, module, index, line = place
        # What is computed here is not part of the run.
        with self.paused():
            rms, largest, mean, *sample = _numbers(tensor)
        dtype, count = dtype_name(tensor.dtype), tensor.numel()
        self.values.append(
            Fingerprint(
                module, op, direction, index, line, dtype, count, rms, largest, mean, tuple(sample)
            )
        )


def _numbers(tensor: Tensor) -> list[float]:
    """Return rms, largest value, mean and the sample, copied to the host in one copy."""
    values = tensor.detach().double().flatten()
    count = values.numel()
    positions = torch.arange(min(_SAMPLES, count), device=values.device)
    positions = positions * count // min(_SAMPLES, count)
    stats = [values.square().mean().sqrt(), values.abs().max(), values.mean()]
    numbers: list[float] = torch.cat([torch.stack(stats), values[positions]]).tolist()
    return numbers


def _is_value(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and value.is_floating_point() and value.numel() > 0


def record_values(
    log: str | os.PathLike[str],
    step_or_model: Any,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    policy: PolicyArg | None = None,
    *,
    scaler: Any = None,
    step: int | None = None,
    **overrides: Any,
) -> tuple[Fingerprint, ...]:
    """Run a batch forward and backward, and append fingerprints of all results to a log.

    `mezzo.compare_runs` compares two such logs. Runs on a copy, eagerly; nothing is changed. The
    log is a file of JSON Lines; a new one gets a first line about the run. Arguments after `log`
    are those of `mezzo.trace_overflow`.

    >>> import tempfile
    >>> model = nn.Linear(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     values = record_values(f"{folder}/a.jsonl", model, torch.ones(3, 4), torch.mean)
    >>> [(one.direction, one.op) for one in values][:2]
    [('forward', 'linear'), ('forward', 'mean')]
    """
    replay = replay_of(step_or_model, batch, loss_fn, policy, scaler, **overrides)
    number = replay.number if step is None else step
    recorders: list[ValueRecorder] = []

    @contextmanager
    def observer(*args: Any) -> Iterator[ValueRecorder]:
        recorder = ValueRecorder(*args)
        recorders.append(recorder)
        with recorder:
            yield recorder

    trace = replay.run(replay.policy, observer=observer)
    values = tuple(_unscaled(value, trace.scale) for value in recorders[0].values)
    record = {
        "kind": KIND,
        "step": number,
        "time": 0.0,
        "loss": None if trace.loss is None else _plain(trace.loss),
        "values": [value.to_dict() for value in values],
    }
    _append(Path(log), replay, record)
    return values


def _unscaled(fingerprint: Fingerprint, scale: float) -> Fingerprint:
    if fingerprint.direction == "forward" or scale == 1.0:
        return fingerprint
    return replace(
        fingerprint,
        rms=fingerprint.rms / scale,
        max=fingerprint.max / scale,
        mean=fingerprint.mean / scale,
        sample=tuple(value / scale for value in fingerprint.sample),
    )


def _append(path: Path, replay: Replay, record: dict[str, Any]) -> None:
    lines = [json.dumps(record)]
    if not path.exists() or not path.stat().st_size:
        dtype = replay.policy.dtype
        header = RunStarted(
            model=type(replay.models[0]).__name__,
            policy=repr(replay.policy),
            dtype=None if dtype is None else dtype_name(dtype),
            device=str(replay.device),
            torch=torch.__version__,
            started=time.time(),
        )
        lines.insert(0, json.dumps(header.to_json()))
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
