"""Write the log of a run for TensorBoard: scalars, exponent histograms and texts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mezzo._errors import UnsupportedError
from mezzo.reporting.layers import gradient_shares
from mezzo.reporting.run_data import Line, RankLog, RunData, Source, finite, read_run, step_of
from mezzo.reporting.verdict import judge


def write_tensorboard(log: Source, folder: str | os.PathLike[str]) -> Path:
    """Write a run as event files that TensorBoard shows, and return the folder.

    Scalars are the loss, the loss scale, skipped steps, the gradient norm, and by layer underflow
    and headroom; histograms are the exponents of sampled tensors; texts the verdict and the skips.
    With several ranks each has a folder of its own.

    Args:
        log: As for `mezzo.write_report`.
        folder: The folder to write to: `tensorboard --logdir folder` shows it.

    Raises:
        UnsupportedError: tensorboard is not installed.
    """
    run, target = read_run(log), Path(folder)
    writer_class = _writer_class()
    for one in run.ranks:
        rank_folder = target / f"rank{one.rank}" if run.world_size > 1 else target
        with writer_class(str(rank_folder)) as writer:
            _write_rank(writer, run, one)
    return target


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedError(
            "write_tensorboard() needs tensorboard, which is not installed. Run:"
            " pip install 'mezzo[tensorboard]'"
        ) from error
    return SummaryWriter


def _write_rank(writer: Any, run: RunData, log: RankLog) -> None:
    verdict = judge(run)
    # TensorBoard renders texts as Markdown, in which tags would be tags.
    writer.add_text("verdict", escape("\n\n".join([verdict.sentence, *verdict.facts])))
    for skip in log.skips:
        text = f"{skip.cause} (first in {skip.parameter})" if skip.parameter else skip.cause
        writer.add_text("skips", escape(text), skip.step)
    for name, value, step in _scalars(log):
        writer.add_scalar(name, value, step)
    for line in log.of("tensors"):
        _write_histograms(writer, line)


def _scalars(log: RankLog) -> Iterator[tuple[str, float, int]]:
    for line in log.of("step"):
        step = step_of(line)
        if step is None:
            continue
        for field in ("loss", "scale", "norm"):
            value = finite(line.get(field))
            if value is not None:
                yield f"step/{field}", value, step
        yield "step/skipped", float(line.get("skipped") is True), step
    for line in log.of("gradients"):
        step = step_of(line)
        for layer, share in gradient_shares(line) if step is not None else ():
            yield f"gradient underflow/{layer}", share, step or 0
    for line in log.of("tensors"):
        step = step_of(line)
        for layer, stats in (line.get("stats") or {}).items() if step is not None else ():
            headroom = finite(stats.get("headroom"))
            if headroom is not None:
                yield f"headroom of {line.get('which')}/{layer}", headroom, step or 0


def _write_histograms(writer: Any, line: Line) -> None:
    step = step_of(line)
    for layer, stats in (line.get("stats") or {}).items():
        rows = [row for row in stats.get("histogram") or () if len(row) == 2]  # noqa: PLR2004
        if step is None or not rows:
            continue
        counts = [int(count) for _, count in rows]
        total = sum(exponent * count for exponent, count in rows)
        writer.add_histogram_raw(
            f"exponents of {line.get('which')}/{layer}",
            min=rows[0][0],
            max=rows[-1][0] + 1,
            num=sum(counts),
            sum=total,
            sum_squares=sum(exponent**2 * count for exponent, count in rows),
            # The upper end of each exponent's bin.
            bucket_limits=[exponent + 1 for exponent, _ in rows],
            bucket_counts=counts,
            global_step=step,
        )
