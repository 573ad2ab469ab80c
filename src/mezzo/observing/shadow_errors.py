"""`mezzo.shadow`: the relative error of every op and module of a batch against exact values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mezzo._dtypes import dtype_name
from mezzo.observing.replay_setup import replay_of
from mezzo.observing.shadow_run import OpError, shadowed
from mezzo.prepare.plan import PolicyArg

_COLUMNS = ("module", "op", "pass", "dtype", "calls", "error", "inputs", "line")
_ACCUMULATION = "AccumulateGrad"


@dataclass(frozen=True)
class ErrorRow:
    """The error of one op of one module, in one pass."""

    module: str
    """The path of the module; empty for the model itself and for the loss."""
    op: str
    direction: str
    """`"forward"` or `"backward"`."""
    dtype: str
    """The dtype of the last result."""
    calls: int
    """How many results were compared."""
    error: float
    """The largest relative error of a result; infinite if it is not finite and should be. For a
    result that is zero but for rounding, relative to the inputs."""
    inputs: float
    """The largest relative error of the inputs: what the op was given, not what it added."""
    line: str
    """The file and line of the code that called it."""


@dataclass(frozen=True)
class ShadowErrors:
    """The errors of all ops of a batch, in the order in which they ran first; print it."""

    rows: tuple[ErrorRow, ...]
    loss: float | None
    """The loss under the policy."""

    def of(self, module: str) -> tuple[ErrorRow, ...]:
        """Return the rows of one module and of the modules inside it."""
        return tuple(
            row for row in self.rows if row.module == module or row.module.startswith(f"{module}.")
        )

    def modules(self, direction: str = "forward") -> dict[str, float]:
        """Return the largest error of each module's ops in one pass."""
        errors: dict[str, float] = {}
        for row in self.rows:
            if row.direction == direction:
                errors[row.module] = max(row.error, errors.get(row.module, 0.0))
        return errors

    def worst(self, count: int = 10) -> tuple[ErrorRow, ...]:
        """Return the rows with the largest errors."""
        return tuple(sorted(self.rows, key=lambda row: -row.error)[:count])

    def __str__(self) -> str:
        lines = [_COLUMNS, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def shadow(
    step_or_model: Any,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    policy: PolicyArg | None = None,
    *,
    scaler: Any = None,
    **overrides: Any,
) -> ShadowErrors:
    """Run a batch forward and backward along with exact values, and return the error of every op.

    The exact values are computed op by op in float64 from the same weights and inputs: the error
    is that of the whole computation up to the op, and for float32 it is about 1e-7. Runs on a
    copy, eagerly; nothing is changed. Arguments are those of `mezzo.trace_overflow`.

    >>> import torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    >>> errors = shadow(model, torch.ones(4, 8), torch.mean, dtype="bfloat16")
    >>> 1e-4 < errors.modules()["2"] < 0.05
    True
    >>> [row.op for row in errors.of("1") if row.direction == "forward"]
    ['gelu']
    """
    replay = replay_of(step_or_model, batch, loss_fn, policy, scaler, **overrides)
    errors: list[OpError] = []
    trace = replay.run(replay.policy, observer=partial(shadowed, observe=errors.append))
    return ShadowErrors(tuple(_rows(errors)), trace.loss)


def _rows(errors: list[OpError]) -> list[ErrorRow]:
    rows: dict[tuple[Any, ...], ErrorRow] = {}
    for error in errors:
        if error.place.op == _ACCUMULATION:
            # Gradients of parameters, which the ops before have computed.
            continue
        direction = "backward" if error.backward else "forward"
        key = (error.place, direction)
        before = rows.get(key)
        rows[key] = ErrorRow(
            error.place.module,
            error.place.op,
            direction,
            dtype_name(error.dtype),
            1 if before is None else before.calls + 1,
            error.error if before is None else max(before.error, error.error),
            error.before if before is None else max(before.inputs, error.before),
            error.place.source,
        )
    return list(rows.values())


def _cells(row: ErrorRow) -> tuple[str, ...]:
    error, inputs = f"{row.error:.1e}", f"{row.inputs:.1e}"
    calls = str(row.calls)
    return row.module, row.op, row.direction, row.dtype, calls, error, inputs, row.line
