"""`mezzo.TensorBoardLogger`: write runs for TensorBoard: scalars, exponent histograms and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from mezzo._errors import UnsupportedError
from mezzo.reporting.loggers import replay
from mezzo.reporting.run_data import Source, read_run


class TensorBoardLogger:
    """Writes a run as event files that TensorBoard shows: `tensorboard --logdir folder`.

    Args:
        folder: The folder to write to, or a `SummaryWriter` of your own, which stays open.

    Raises:
        UnsupportedError: tensorboard is not installed.

    >>> import mezzo, tempfile, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, torch.nn.functional.mse_loss, optimizer, "O2")
    >>> with mezzo.observe(step, loggers=[mezzo.TensorBoardLogger(tempfile.mkdtemp())]):
    ...     loss = step(torch.ones(8, 4), torch.zeros(8, 2))
    """

    def __init__(self, folder: str | os.PathLike[str] | Any) -> None:
        self._new_writer = _writer_class()
        is_folder = isinstance(folder, str | os.PathLike)
        if not is_folder and not hasattr(folder, "add_scalar"):
            raise UnsupportedError(
                f"TensorBoardLogger takes a folder or a SummaryWriter, got {folder!r}. Pass"
                " TensorBoardLogger('board')."
            )
        self._folder = os.fspath(folder) if is_folder else None
        self._writer: Any = None if is_folder else folder

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers as scalars."""
        for name, value in values.items():
            self._open().add_scalar(name, value, step)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Write a text, which TensorBoard renders as Markdown."""
        # In Markdown tags would be tags.
        self._open().add_text(name, escape(text), step)

    def log_histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        """Write exponents as a histogram."""
        self._open().add_histogram_raw(
            name,
            min=min(counts),
            max=max(counts) + 1,
            num=sum(counts.values()),
            sum=sum(exponent * count for exponent, count in counts.items()),
            sum_squares=sum(exponent**2 * count for exponent, count in counts.items()),
            # The upper end of each exponent's bin.
            bucket_limits=[exponent + 1 for exponent in counts],
            bucket_counts=list(counts.values()),
            global_step=step,
        )

    def close(self) -> None:
        """Write what is left, and close the files unless they belong to a writer of your own."""
        if self._writer is None:
            return
        if self._folder is None:
            self._writer.flush()
        else:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            # At the first record, so that only a rank that writes makes a file.
            self._writer = self._new_writer(self._folder)
        return self._writer


def write_tensorboard(log: Source, folder: str | os.PathLike[str]) -> Path:
    """Write a finished run as event files that TensorBoard shows, and return the folder.

    The same as `mezzo.write_log(log, mezzo.TensorBoardLogger(folder))`, but with several ranks each
    has a folder of its own.

    Args:
        log: As for `mezzo.write_report`.
        folder: The folder to write to: `tensorboard --logdir folder` shows it.

    Raises:
        UnsupportedError: tensorboard is not installed.
    """
    run, target = read_run(log), Path(folder)
    for rank in run.ranks:
        rank_folder = target / f"rank{rank.rank}" if run.world_size > 1 else target
        replay(run, rank, TensorBoardLogger(rank_folder))
    return target


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError(
            "TensorBoardLogger needs tensorboard, which is not installed. Run:"
            " pip install 'mezzo[tensorboard]'"
        ) from error
    return SummaryWriter
