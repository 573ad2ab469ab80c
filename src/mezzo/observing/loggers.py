"""`mezzo.Logger`: the protocol of loggers, and how the records of a run become its calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mezzo._errors import PolicyError
from mezzo.observing.log import step_interval
from mezzo.observing.log_values import (
    Line,
    finite,
    gradient_counts,
    number,
    step_of,
    tensor_stats,
)
from mezzo.observing.records import Record, StepRecord
from mezzo.observing.skip_causes import SkipCauses

_STEP_FIELDS = ("loss", "scale", "norm", "rate")
_SAMPLED_FIELDS = ("headroom", "underflow", "lost")


@runtime_checkable
class Logger(Protocol):
    """What a logger has: three methods. `mezzo.observe(..., loggers=[...])` calls them.

    They are called by the thread that trains, with numbers that are on the host already: a logger
    that returns quickly costs little. A logger for histograms has a fourth method,
    `log_histogram(step, name, counts)`: `counts` are numbers of values by exponent, and exponent e
    stands for magnitudes from 2**e up to 2**(e+1).

    >>> import mezzo, torch
    >>> class Printer:
    ...     def log_scalars(self, step, values):
    ...         print(step, values["step/scale"], values["step/rate"])
    ...     def log_text(self, step, name, text):
    ...         pass
    ...     def close(self):
    ...         print("closed")
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, torch.nn.functional.mse_loss, optimizer, "O2")
    >>> with mezzo.observe(step, loggers=[Printer()], numerics=False):
    ...     loss = step(torch.ones(8, 4), torch.zeros(8, 2))
    1 1.0 0.1
    closed
    """

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step by name; they may be NaN or infinite.

        Steps are not always in order: samples of a step can follow later steps.
        """

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log a text at a step, such as why it was skipped."""

    def close(self) -> None:
        """End the logging: called once, when the run stops."""


@runtime_checkable
class _HistogramLogger(Logger, Protocol):
    """A logger that takes histograms too."""

    def log_histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        """Log how many values have which exponent."""


def check_loggers(loggers: Any) -> tuple[Logger, ...]:
    """Return the loggers of a run, passed as one or several; raise `PolicyError` for others."""
    is_single = isinstance(loggers, Logger | str) or not isinstance(loggers, Sequence)
    checked = (loggers,) if is_single else tuple(loggers)
    for logger in checked:
        missing = [name for name in _methods() if not callable(getattr(logger, name, None))]
        if missing or isinstance(logger, type):
            lacks = "is a class" if isinstance(logger, type) else f"has no {missing[0]}()"
            raise PolicyError(
                f"loggers={logger!r} {lacks}. Pass loggers such as mezzo.CSVLogger('run.csv'), or"
                f" objects with the methods {', '.join(_methods())} of mezzo.Logger."
            )
    return checked


def _methods() -> tuple[str, ...]:
    return Logger.log_scalars.__name__, Logger.log_text.__name__, Logger.close.__name__


class LoggerWriter:
    """Writes the records of a run to loggers. One that raises does not end the training.

    Of the steps those are written that a log has: all of the first 1000, every 10th up to 10 000,
    and so on, and every skipped one.
    """

    def __init__(self, loggers: Sequence[Logger], causes: SkipCauses | None = None) -> None:
        self._loggers = tuple(loggers)
        self._causes = causes or SkipCauses()
        self._failed: set[int] = set()

    def step_interval(self, step: int, together: int = 1) -> int:
        """Return n if every n-th step that was not skipped is written, as for a log."""
        return step_interval(step, together)

    def write(self, records: Sequence[Record]) -> None:
        """Write records."""
        for record in records:
            self.write_line(record.to_json())

    def write_steps(self, steps: Sequence[Line]) -> None:
        """Write records of steps, passed as their fields."""
        for step in steps:
            if step["skipped"] or step["step"] % step_interval(step["step"]) == 0:
                self.write_line({"kind": StepRecord.kind, **step})

    def write_line(self, line: Line) -> None:
        """Write a record, passed as its line in a log."""
        step = step_of(line)
        if line.get("kind") == "run":
            self.write_text(0, "run", _describe_run(line))
        if step is None:
            return
        if scalars := dict(_scalars(line)):
            self._call(lambda logger: logger.log_scalars(step, scalars))
        for name, text in self._texts(line):
            self.write_text(step, name, text)
        for name, counts in _histograms(line):
            self._write_histogram(step, name, counts)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text."""
        self._call(lambda logger: logger.log_text(step, name, text))

    def close(self) -> None:
        """Close the loggers."""
        self._call(lambda logger: logger.close())

    def _write_histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        def write(logger: Logger) -> None:
            if isinstance(logger, _HistogramLogger):
                logger.log_histogram(step, name, counts)

        self._call(write)

    def _texts(self, line: Line) -> Iterator[tuple[str, str]]:
        if line.get("kind") == "event":
            yield "events", _describe_event(line)
        skip = self._causes.add(line) if line.get("kind") == StepRecord.kind else None
        if skip is not None:
            first = f" (first in {skip.parameter})" if skip.parameter else ""
            yield "skips", skip.cause + first

    def _call(self, call: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001 - anything may fail in a user's logger
                self._warn(logger, error)

    def _warn(self, logger: Logger, error: Exception) -> None:
        if id(logger) in self._failed:
            return
        self._failed.add(id(logger))
        warnings.warn(
            f"The logger {type(logger).__name__} raised {type(error).__name__}: {error}. The"
            " training goes on; what it could not log is missing, and it is not mentioned again.",
            UserWarning,
            stacklevel=2,
        )


def _scalars(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name."""
    match line.get("kind"):
        case "step":
            yield from _step_scalars(line)
        case "gradients":
            for layer, counts in gradient_counts(line):
                if counts.underflow is not None:
                    yield f"gradient underflow/{layer}", counts.underflow
        case "tensors":
            yield from _sampled_scalars(line)


def _step_scalars(line: Line) -> Iterator[tuple[str, float]]:
    for field in _STEP_FIELDS:
        value = number(line.get(field))
        if value is not None:
            # A NaN too: a gap in the curve of a loss would hide it.
            yield f"step/{field}", value
    yield "step/skipped", float(line.get("skipped") is True)


def _sampled_scalars(line: Line) -> Iterator[tuple[str, float]]:
    for layer, stats in tensor_stats(line):
        for field in _SAMPLED_FIELDS:
            value = finite(stats.get(field))
            if value is not None:
                yield f"{field} of {line.get('which')}/{layer}", value


def _histograms(line: Line) -> Iterator[tuple[str, dict[int, int]]]:
    for layer, stats in tensor_stats(line) if line.get("kind") == "tensors" else ():
        counts = {}
        for row in stats.get("histogram") or ():
            match row:
                case [int(exponent), int(count)]:
                    counts[exponent] = count
        if counts:
            yield f"exponents of {line.get('which')}/{layer}", counts


def _describe_run(line: Line) -> str:
    """Return the header of a log as a text.

    >>> _describe_run({"model": "GPT", "policy": "O2", "device": "cuda:0", "torch": "2.13"})
    'GPT, O2, cuda:0, torch 2.13'
    """
    parts = [line.get(name) for name in ("model", "policy", "dtype", "device")]
    versions = [f"{name} {line[name]}" for name in ("torch", "mezzo") if line.get(name)]
    return ", ".join([*(str(part) for part in parts if part), *versions])


def _describe_event(line: Line) -> str:
    fields = line.get("fields")
    values = fields.items() if isinstance(fields, Mapping) else ()
    return f"{line.get('name')}: " + ", ".join(f"{name}={value}" for name, value in values)
