"""`mezzo.compare_runs`: the first op that differs between two runs by more than rounding."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mezzo._errors import PolicyError
from mezzo.observing.log import read_log
from mezzo.observing.recorded_values import KIND, Fingerprint

_MARGIN = 8.0
"""Units of rounding that one op may add: kernels sum in different orders, and amplify a little."""

Log = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class RunDifference:
    """Where two runs differ first. False if rounding explains all differences; print it."""

    op: str = ""
    """The first op whose result differs by more than its dtype explains; empty if none does."""
    module: str = ""
    direction: str = ""
    """`"forward"`, or `"backward"` if the gradient of the result differs."""
    line: str = ""
    step: int | None = None
    difference: float = 0.0
    """Its relative difference."""
    bound: float = 0.0
    """What rounding explains."""
    dtypes: tuple[str, str] = ("", "")
    """The dtypes of its result in the two runs."""
    compared: int = 0
    """Results that were compared."""
    largest: float = 0.0
    """The largest relative difference of a result up to there."""
    only_in: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Ops that only the first run called, up to there, and that only the second run called."""
    loss_step: int | None = None
    """The first step whose loss differs by more than rounding; None if none does."""
    losses: tuple[float, float] | None = None
    """The losses of that step."""

    def __bool__(self) -> bool:
        return bool(self.op) or self.loss_step is not None or any(self.only_in)

    def __str__(self) -> str:
        parts = [*self._op_text(), *self._structure_text()]
        if self.loss_step is not None and self.losses is not None:
            one, other = self.losses
            parts.append(f"The loss differs first at step {self.loss_step}: {one:g} and {other:g}.")
        if not parts:
            parts.append(
                f"Rounding explains all differences: {self.compared} results were compared, the"
                f" largest difference is {self.largest:.1e}."
            )
        return " ".join(parts)

    def _op_text(self) -> list[str]:
        if not self.op:
            return []
        where = ", ".join(filter(None, (self.line, self.module and f"in {self.module}")))
        name = "The gradient of the result of " if self.direction == "backward" else ""
        dtypes = " and ".join(dict.fromkeys(self.dtypes))
        step = "" if self.step is None else f" at step {self.step}"
        subject = f"{name}{self.op}{f' ({where})' if where else ''}"
        explained = f"where {dtypes} explains {self.bound:.1e}"
        return [f"{subject} differs first{step}: by {self.difference:.1e}, {explained}."]

    def _structure_text(self) -> list[str]:
        named = zip(("first", "second"), self.only_in, strict=True)
        return [f"Only the {which} run calls {', '.join(ops[:5])}." for which, ops in named if ops]


def compare_runs(log_a: Log, log_b: Log) -> RunDifference:
    """Compare two logs, and name the first op that differs by more than its dtype explains.

    For two runs, two policies or two commits: the logs need values that `mezzo.record_values` has
    written, of the same batch and weights. Results are matched by module, op and call, in the
    order in which they ran. Rounding explains a difference of at most 8 eps √n: eps is that of the
    coarsest dtype up to there, and n the number of results up to there, whose errors add up as a
    random walk. Losses that the logs have of the same steps are compared too.

    Args:
        log_a: The path of a log, or its records.
        log_b: The other.

    >>> import tempfile, mezzo
    >>> from torch import nn
    >>> x, gelu = torch.linspace(-1.0, 1.0, 32).view(4, 8), nn.Linear(8, 8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, kind in {"a": "none", "b": "tanh"}.items():
    ...         model = nn.Sequential(gelu, nn.GELU(approximate=kind))
    ...         _ = mezzo.record_values(f"{folder}/{name}", model, x, torch.mean, "O0")
    ...     found = compare_runs(f"{folder}/a", f"{folder}/b")
    >>> found.op, found.module, found.direction
    ('gelu', '1', 'forward')
    """
    records: list[list[Mapping[str, Any]]] = [
        list(read_log(log) if isinstance(log, str | os.PathLike) else log) for log in (log_a, log_b)
    ]
    values = [
        {record.get("step"): record for record in of if record.get("kind") == KIND}
        for of in records
    ]
    if not all(values) and not all(any("loss" in record for record in of) for of in records):
        raise PolicyError(
            "There is nothing to compare: a log has neither values nor losses. Write values with"
            " mezzo.record_values(log, step, batch)."
        )
    loss_step, losses = _first_loss(*records)
    found = RunDifference()
    for step in [key for key in values[0] if key in values[1]]:
        one, other = (_fingerprints(of[step]) for of in values)
        found = _compare_values(one, other, step)
        if found:
            break
    return RunDifference(**{**vars(found), "loss_step": loss_step, "losses": losses})


# -- values ----------------------------------------------------------------------------------------


@dataclass
class _Comparison:
    """The results that were compared so far."""

    unit: float = 0.0
    """The eps of the coarsest dtype."""
    compared: int = 0
    largest: float = 0.0
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def bound_of(self, one: Fingerprint, other: Fingerprint) -> float:
        """Count one more result, and return what rounding explains for it."""
        self.unit = max(self.unit, _eps(one.dtype), _eps(other.dtype))
        self.compared += 1
        return _MARGIN * self.unit * math.sqrt(self.compared)

    def add_difference(self, difference: float) -> None:
        """Note the difference of two results."""
        self.largest = max(self.largest, difference)

    def add_unmatched(self, run: int, fingerprint: Fingerprint, other: Fingerprint | None) -> None:
        """Note a result that the other run does not have, or has with another size."""
        name = f"{fingerprint.op} in {fingerprint.module}" if fingerprint.module else fingerprint.op
        name += f" with {fingerprint.count} values" if other is not None else ""
        # Once for a result and its gradient.
        if name not in self.only[run]:
            self.only[run].append(name)


def _compare_values(
    one: list[Fingerprint], other: list[Fingerprint], step: int | None
) -> RunDifference:
    state = _Comparison()
    for before, after in _matched(one, other, state):
        bound, difference = state.bound_of(before, after), _difference(before, after)
        state.add_difference(difference)
        if difference > bound:
            return RunDifference(
                before.op,
                before.module,
                before.direction,
                before.line,
                step,
                difference,
                bound,
                (before.dtype, after.dtype),
                state.compared,
                state.largest,
                (tuple(state.only[0]), tuple(state.only[1])),
            )
    return RunDifference(
        step=step,
        compared=state.compared,
        largest=state.largest,
        only_in=(tuple(state.only[0]), tuple(state.only[1])),
    )


def _matched(
    one: list[Fingerprint], other: list[Fingerprint], state: _Comparison
) -> Iterator[tuple[Fingerprint, Fingerprint]]:
    """Yield the results that both runs have, in the order of the first; note the others."""
    known, seen = {_key(it): it for it in other}, {_key(it): it for it in one}
    for it in other:
        if (match := seen.get(_key(it))) is None or match.count != it.count:
            state.add_unmatched(1, it, match)
    for it in one:
        if (match := known.get(_key(it))) is None or match.count != it.count:
            state.add_unmatched(0, it, match)
        else:
            yield it, match


def _key(fingerprint: Fingerprint) -> tuple[Any, ...]:
    return fingerprint.direction, fingerprint.module, fingerprint.op, fingerprint.index


def _difference(first: Fingerprint, second: Fingerprint) -> float:
    """Return the relative difference of two results, by their norms and their samples."""
    scale = max(first.rms, second.rms)
    if not (math.isfinite(first.rms) and math.isfinite(second.rms)):
        same = str(first.rms) == str(second.rms)
        return 0.0 if same else math.inf
    if scale == 0.0:
        return 0.0
    squares = [(a - b) ** 2 for a, b in zip(first.sample, second.sample, strict=True)]
    sampled = math.sqrt(sum(squares) / len(squares))
    return max(abs(first.rms - second.rms), sampled) / scale


def _fingerprints(record: Mapping[str, Any]) -> list[Fingerprint]:
    return [Fingerprint.from_dict(value) for value in record["values"]]


# -- losses and files ------------------------------------------------------------------------------


def _first_loss(
    one: list[Mapping[str, Any]], other: list[Mapping[str, Any]]
) -> tuple[int | None, tuple[float, float] | None]:
    """Return the first step whose loss differs by more than rounding, and the two losses."""
    curves = [
        {it["step"]: float(it["loss"]) for it in of if it.get("loss") is not None}
        for of in (one, other)
    ]
    dtypes = [it.get("dtype") for of in (one, other) for it in of if it.get("kind") == "run"]
    unit = max((_eps(it) for it in dtypes if it), default=_eps("float32"))
    for number, step in enumerate(sorted(set(curves[0]) & set(curves[1]), key=lambda at: at or 0)):
        a, b = curves[0][step], curves[1][step]
        bound = _MARGIN * unit * math.sqrt(number + 1) * max(abs(a), abs(b))
        if not (math.isnan(a) and math.isnan(b)) and not (a == b or abs(a - b) <= bound):
            return step, (a, b)
    return None, None


def _eps(name: str) -> float:
    """Return the distance between 1 and the next number of a dtype."""
    return float(torch.finfo(getattr(torch, name)).eps)
