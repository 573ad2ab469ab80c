"""Loggers for CSV files and Weights & Biases; `mezzo.write_log` writes a finished log to any."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mezzo._errors import UnsupportedError
from mezzo.observing.log_values import step_of
from mezzo.observing.loggers import Logger, LoggerWriter, check_loggers
from mezzo.observing.skip_causes import SkipCauses
from mezzo.reporting.run_data import RankLog, RunData, Source, read_run
from mezzo.reporting.verdict import judge


class CSVLogger:
    """Writes a run to a CSV file, one value a line: `step`, `name`, `value`, `text`.

    Numbers are in the column `value`, texts in `text`. New names need no new column, and the file
    is complete after every line. An old file of that name is replaced at the first line.

    Args:
        path: The file to write.

    >>> import mezzo, tempfile, torch
    >>> from pathlib import Path
    >>> path = tempfile.mktemp(suffix=".csv")
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, torch.nn.functional.mse_loss, optimizer, "O2")
    >>> with mezzo.observe(step, loggers=[mezzo.CSVLogger(path)]):
    ...     loss = step(torch.ones(8, 4), torch.zeros(8, 2))
    >>> [line for line in Path(path).read_text().splitlines() if "rate" in line]
    ['1,step/rate,0.1,']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        """The file."""
        self._file: IO[str] | None = None
        self._is_closed = False

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line for each number."""
        self._write((step, name, repr(float(value)), "") for name, value in values.items())

    def log_text(self, step: int, name: str, text: str) -> None:
        """Write a text as a line."""
        self._write([(step, name, "", text)])

    def close(self) -> None:
        """Close the file: the logger cannot be used again."""
        self._is_closed = True
        if self._file is not None:
            self._file.close()

    def _write(self, rows: Any) -> None:
        if self._is_closed:
            raise UnsupportedError(
                f"This CSVLogger has closed {self.path} with its run. Make a new one for each run."
            )
        if self._file is None:
            # At the first line, so that only a rank that writes opens the file.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8", newline="")
            csv.writer(self._file).writerow(("step", "name", "value", "text"))
        csv.writer(self._file).writerows(rows)
        self._file.flush()


class WandbLogger:
    """Writes a run to Weights & Biases: numbers as metrics, exponents as histograms, texts.

    Metrics have `step/number` as their step, so that they mix with those that your own code logs
    in the same run. A run that you pass stays open; one that the logger starts is finished.

    Args:
        run: A run that `wandb.init` returned. Without it, the logger starts one when the first
            record arrives.
        **options: Arguments of `wandb.init` for that, such as `project="digits"`.

    Raises:
        UnsupportedError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        try:
            import wandb  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise UnsupportedError(
                "WandbLogger needs wandb, which is not installed. Run: pip install 'mezzo[wandb]'"
            ) from error
        if run is not None and options:
            raise UnsupportedError(
                f"WandbLogger got a run and {', '.join(options)}= for a new one. Pass either the"
                " run that wandb.init returned, or the arguments of wandb.init."
            )
        self._wandb: Any = wandb
        self._options = options
        self._run, self._is_own = run, run is None
        self._defined: set[str] = set()

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers as metrics."""
        self._log(step, dict(values))

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log a text, as a value of its step."""
        self._log(step, {name: text})

    def log_histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        """Log exponents as a histogram."""
        first, last = min(counts), max(counts)
        heights = [counts.get(exponent, 0) for exponent in range(first, last + 1)]
        histogram = (heights, list(range(first, last + 2)))
        self._log(step, {name: self._wandb.Histogram(np_histogram=histogram)})

    def close(self) -> None:
        """Finish the run, if the logger started it."""
        if self._is_own and self._run is not None:
            self._run.finish()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self._options)
        for name in values.keys() - self._defined:
            # wandb refuses steps that go back, as those of samples can do.
            self._run.define_metric(name, step_metric="step/number")
        self._defined |= values.keys()
        self._run.log({**values, "step/number": step})


def write_log(log: Source, logger: Logger) -> None:
    """Write a finished run to a logger, as `mezzo.observe(..., loggers=[logger])` does live.

    Besides the records, the verdict on the run is written. Of a run with several ranks, the first.

    Args:
        log: As for `mezzo.write_report`.
        logger: A `TensorBoardLogger`, a `WandbLogger`, a `CSVLogger` or your own `Logger`. It is
            closed at the end.

    >>> import mezzo, tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(2, 1)
    >>> with mezzo.observe(model, log=f"{folder}/run.jsonl"):
    ...     output = model(torch.ones(1, 2))
    >>> mezzo.write_log(f"{folder}/run.jsonl", mezzo.CSVLogger(f"{folder}/run.csv"))
    """
    (checked,) = check_loggers([logger])
    run = read_run(log)
    replay(run, run.ranks[0], checked)


def replay(run: RunData, rank_log: RankLog, logger: Logger) -> None:
    """Write the records of a rank and the verdict on its run to a logger, and close it."""
    findings = {step_of(line): line for line in rank_log.of("finding")}
    writer = LoggerWriter([logger], SkipCauses(rank_log.rank, findings))
    lines = [line for lines in rank_log.records.values() for line in lines]
    for line in sorted(lines, key=lambda line: step_of(line) or 0):
        writer.write_line(line)
    verdict = judge(run)
    writer.write_text(run.steps, "verdict", "\n\n".join([verdict.sentence, *verdict.facts]))
    writer.close()
