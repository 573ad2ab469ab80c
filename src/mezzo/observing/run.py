"""`mezzo.observe`: watch the precision of a run, keep its history and write its log."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import nn

from mezzo import _events
from mezzo._errors import PolicyError
from mezzo._launch import AsyncCopy, is_capturing, needs_sync
from mezzo.observing.arguments import check_number, check_target, header, ranks
from mezzo.observing.attachments import Attachment, LoopAttachment, StepAttachment
from mezzo.observing.kept_steps import KEPT, KeptSteps
from mezzo.observing.log import LogWriter, log_path
from mezzo.observing.loggers import Logger, LoggerWriter, check_loggers
from mezzo.observing.numerics import Collector, NumericsCollector, NumericsTable
from mezzo.observing.op_stats import OpSampler, SampledOps
from mezzo.observing.records import (
    EventRecord,
    GradientsRecord,
    Record,
    RunEnded,
    StepRecord,
)
from mezzo.observing.sample_interval import DEFAULT_INTERVAL, SampleInterval
from mezzo.prepare.arguments import uncompiled, unwrapped
from mezzo.scaling.gradient_counts import Counts
from mezzo.scaling.observed_scaler import Scaler
from mezzo.step.base import Step

Optimizer = torch.optim.Optimizer

_POLL_STEPS = 2048
"""Steps between two polls of the history of a device, at most: it holds a few times as many."""
_POLL_SECONDS = 0.25
"""Seconds between them, if steps are long."""


def observe(
    target: nn.Module | Step,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Scaler | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
    every: int | None = None,
    max_bytes: int = 64 * 2**20,
    numerics: bool = True,
    ops: bool = False,
    loggers: Logger | Sequence[Logger] = (),
) -> Run:
    """Observe a training run: its skips, its loss scale, and how its numbers fit their dtypes.

    Each step records, without waiting for the device: loss, loss scale, whether it was skipped, and
    the first parameter whose gradient was not finite. A loss scaler also counts, as it checks the
    gradients, how many values of each overflowed and underflowed. Every `every` steps, from the
    first, a sample records range, headroom, underflow and exponents of parameters, activations,
    gradients and updates.

    A step is captured again when a run is attached, and when it stops. A sampled call of a captured
    step runs eagerly, except with several processes: their graphs hold collectives, which all ranks
    run alike, and only what needs no other call is sampled. Gradients are sampled at the end of the
    backward pass: scaled, and averaged over processes. Compiled models run as compiled: their
    activations are not seen. After `stop()`, or the end of the block, models, optimizers, scaler
    and step are as before.

    Args:
        target: A `TrainStep`, a `@train_step` function, or the model of a loop that you wrote.
        optimizer: The optimizer of that loop, or a list of them. Without one, each forward pass of
            the model is a step.
        scaler: The `mezzo.GradScaler` or `torch.amp.GradScaler` of that loop.
        log: File to write records to, as JSON Lines, in place of what is there; `mezzo.read_log`
            reads it, also while the run goes on. With several processes, each writes its own:
            `run.jsonl` becomes `run.rank1.jsonl`.
        every: Steps between samples. None is every 100 steps, and fewer samples where steps are so
            short that these would take more than 1 % of the time of the run; for that each sample
            waits for the device. With several processes it is every 100 steps, which all sample
            alike.
        max_bytes: Size that the log is to keep: records become rarer as it grows. Skipped steps,
            gradients that overflowed and events are always written.
        numerics: Whether to sample tensors.
        ops: Whether to count the ops of a step too, in another step of each interval. Each op takes
            about 20 µs more in it. For a loop of your own, use `mezzo.op_stats` around a step.
        loggers: What to write the same records to as they arrive: `TensorBoardLogger`,
            `WandbLogger`, `CSVLogger` or your own `Logger`. They are closed when the run stops.
            With several processes, rank 0 writes.

    Returns:
        A `Run`: a context manager, with `stop()`.

    >>> import mezzo
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", dtype="float16")
    >>> with mezzo.observe(step) as run:
    ...     for scale in (1.0, 1.0, 1e30):
    ...         loss = step(torch.full((8, 4), scale), torch.zeros(8, 2))
    >>> [(skip.step, skip.parameter) for skip in run.skips]
    [(3, 'weight')]
    """
    return Run(
        target,
        optimizer,
        scaler,
        log=log,
        every=every,
        max_bytes=max_bytes,
        numerics=numerics,
        ops=ops,
        loggers=loggers,
    )


class Run:
    """An observed run; see `mezzo.observe`. What it has collected stays readable after `stop()`."""

    def __init__(
        self,
        target: nn.Module | Step,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: Scaler | None = None,
        *,
        log: str | os.PathLike[str] | None = None,
        every: int | None = None,
        max_bytes: int = 64 * 2**20,
        numerics: bool = True,
        ops: bool = False,
        loggers: Logger | Sequence[Logger] = (),
    ) -> None:
        optimizers = check_target(target, optimizer, scaler, ops=ops)
        checked_loggers = check_loggers(loggers)
        check_number("max_bytes", max_bytes)
        if every is not None:
            check_number("every", every)
        rank, world_size = ranks()
        self.every = every or DEFAULT_INTERVAL
        """Steps between samples. Grows in a run that was passed `every=None`."""
        # Ranks wait for each other: they sample the same steps.
        self._sample_interval = SampleInterval(self.every if world_size > 1 else every)
        self.log = None if log is None else log_path(log, rank, world_size)
        """Path of the log; None without one."""
        self._writers: list[LogWriter | LoggerWriter] = []
        self._lock = threading.RLock()
        self._began = time.perf_counter()
        self._steps = KeptSteps()
        self._events: deque[EventRecord] = deque(maxlen=KEPT)
        self._seen_events: set[_events.Event] = set()
        self._gradients: dict[str, Counts] = {}
        self._logged_gradients: dict[str, Counts] = {}
        self._copies: deque[tuple[int, AsyncCopy]] = deque()
        self._last_counted = self._last_step = 0
        self._last_poll = (0, self._began)
        """Step and time of the last poll of the history."""
        self._next_sample = self._next_poll = self._poll_interval = 1
        self._copy_interval = self._next_copy = self.every
        self._turn = 0
        """Index of the collector that samples the next sampled step."""
        self._sampling: Collector | None = None
        self._numerics = NumericsTable({})
        self._attachment: Attachment | None = self._attach(target, optimizers, scaler)
        self._lags = needs_sync(self._attachment.device)
        self._sampler = NumericsCollector(self._attachment.models) if numerics else None
        self._op_sampler = OpSampler(self._attachment.models) if ops else None
        self._ops = SampledOps() if ops else None
        samplers = (self._sampler, self._op_sampler)
        self.collectors: list[Collector] = [sampler for sampler in samplers if sampler is not None]
        """What collects records from sampled steps: of each interval the first has the first step,
        the second the next one, and so on."""
        self._header = header(self._attachment, rank, world_size)
        self._ended: RunEnded | None = None
        self._stack = ExitStack()
        self._open_writers(max_bytes, checked_loggers if rank == 0 else ())
        self._stack.enter_context(_events.listen(self._add_event))

    def _open_writers(self, max_bytes: int, loggers: Sequence[Logger]) -> None:
        """Create the log, over an old one of that name. If that fails, nothing is attached."""
        try:
            if self.log is not None:
                self._writers.append(LogWriter(self.log, max_bytes))
            if loggers:
                self._writers.append(LoggerWriter(loggers))
            self._write([self._header])
        except BaseException:
            if self._attachment is not None:
                self._attachment.detach()
            raise

    def _attach(
        self, target: nn.Module | Step, optimizers: list[Optimizer], scaler: Scaler | None
    ) -> Attachment:
        if isinstance(target, Step):
            return StepAttachment(target, self)
        # Compiled before or after DistributedDataParallel wrapped it: names are those of the model.
        inner = uncompiled(unwrapped(uncompiled(target)))
        return LoopAttachment(target, optimizers, scaler, self, inner)

    # -- around each step --------------------------------------------------------------------------

    def begin(self, number: int) -> bool:
        """Begin a step; return whether it is sampled. The observed step or loop calls this."""
        if number < self._next_sample or not self.collectors:
            return False
        self._wait_for_steps_before()
        self._sample_interval.begin(number, time.perf_counter())
        # One collector a step, so that none sees the work of another.
        self._sampling, self._next_sample = self.collectors[self._turn], number
        self._sampling.start(number)
        return True

    def end(self, number: int) -> int:
        """End a step; return the next one to see. The observed step or loop calls this."""
        if self._sampling is not None:
            self._stop_sampling(self._sampling)
        if number >= self._next_copy:
            # At a multiple of the interval, and not more often than the history is polled.
            later = -(-(number + self._poll_interval) // self._copy_interval)
            self._next_copy = later * self._copy_interval
            self._copy_counts(number)
        if number >= self._next_poll:
            self._poll_interval = self._steps_to_next_poll(number)
            self._next_poll = number + self._poll_interval
            self._poll(all_arrived=not self._lags)
        following = min(self._next_copy, self._next_poll)
        return min(following, self._next_sample) if self.collectors else following

    def fail(self) -> None:
        """End a step that raised: it does not count."""
        if self._sampling is not None:
            self._stop_sampling(self._sampling)

    def _wait_for_steps_before(self) -> None:
        """Wait for the device if steps are timed: the host may be hundreds of replays ahead."""
        device = None if self._attachment is None else self._attachment.device
        is_timed = self._lags and self._sample_interval.is_timed
        if device is not None and is_timed and not is_capturing(device):
            torch.accelerator.synchronize(device)

    def _steps_to_next_poll(self, number: int) -> int:
        """Return after how many steps to poll the history again: it lags anyway."""
        if not self._lags:
            return 1
        (before, then), now = self._last_poll, time.perf_counter()
        self._last_poll = (number, now)
        steps = (number - before) * _POLL_SECONDS / max(now - then, 1e-9)
        return max(1, min(_POLL_STEPS, int(steps)))

    def _stop_sampling(self, collector: Collector) -> None:
        number, turn = self._next_sample, self._turn
        self._sampling, self._turn = None, (turn + 1) % len(self.collectors)
        self._next_sample += 1
        collector.stop()
        self._sample_interval.end(number, time.perf_counter())
        if self._turn == 0:
            self.every = self._sample_interval.choose()
            self._next_sample = number + max(1, self.every - turn)

    def _copy_counts(self, number: int) -> None:
        counts = None if self._attachment is None else self._attachment.counts
        if counts is not None and self._last_counted < number:
            self._last_counted = number
            self._copies.append((number, AsyncCopy(counts.used())))

    # -- records -----------------------------------------------------------------------------------

    def _poll(self, *, all_arrived: bool) -> None:
        """Take what has arrived on the host, and write it to the log. Does not synchronize."""
        attachment = self._attachment
        if attachment is None:
            return
        rows = attachment.history.take(all_arrived=all_arrived)
        if len(rows):
            self._add_steps(rows, attachment)
        records: list[Record] = []
        while self._copies and self._copies[0][1].arrived():
            number, copy = self._copies.popleft()
            records += self._gradient_records(number, copy, attachment)
        self._write(records)
        self._take_samples()

    def _take_samples(self) -> None:
        began = time.perf_counter()
        records = [
            record for collector in self.collectors for record in collector.take(self._time())
        ]
        if records:
            self._write(records)
            self._sample_interval.spend(time.perf_counter() - began)

    def _add_steps(self, rows: torch.Tensor, attachment: Attachment) -> None:
        now, rate = self._time(), attachment.rate()
        self._steps.add(rows, now, attachment.first_nonfinite, rate)
        with self._lock:
            for writer in self._writers:
                interval = writer.step_interval(int(rows[0, 0]), together=len(rows))
                writer.write_steps(self._steps.logged(rows, now, interval, rate))

    def _gradient_records(
        self, number: int, copy: AsyncCopy, attachment: Attachment
    ) -> list[Record]:
        if attachment.counts is None:
            return []
        rows: list[list[int]] = copy.values()  # type: ignore[assignment]
        by_parameter = attachment.counts.by_parameter(rows)
        self._gradients = {
            attachment.name_of(index): counts for index, counts in sorted(by_parameter.items())
        }
        last, self._logged_gradients = self._logged_gradients, self._gradients
        layers = {
            name: counts.minus(last[name]) if name in last else counts
            for name, counts in self._gradients.items()
        }
        return [GradientsRecord(step=number, time=self._time(), layers=layers)]

    def _add_event(self, event: _events.Event) -> None:
        # Some are emitted at every op.
        if event in self._seen_events:
            return
        with self._lock:
            self._seen_events.add(event)
            record = EventRecord.of(event, self._step_number, self._time())
            self._events.append(record)
        self._write([record])

    def _write(self, records: Sequence[Record]) -> None:
        if records:
            with self._lock:
                for writer in self._writers:
                    writer.write(list(records))

    @property
    def _step_number(self) -> int:
        """Number of the current step, or of the last one."""
        attachment = self._attachment
        return self._last_step if attachment is None else attachment.number

    def _time(self) -> float:
        return round(time.perf_counter() - self._began, 6)

    # -- what was collected ------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepRecord]:
        """The last steps, at most 10 000, with their loss, scale and whether they were skipped.

        Does not synchronize: on CUDA the last few steps may be missing until `stop()`.
        """
        self._refresh()
        return self._steps.records()

    @property
    def skips(self) -> list[StepRecord]:
        """The steps that were skipped, with the first parameter whose gradient was not finite."""
        self._refresh()
        return list(self._steps.skips)

    @property
    def gradients(self) -> dict[str, Counts]:
        """Values of each gradient that overflowed and underflowed, by parameter name.

        Up to a multiple of 100 steps or of the `every` that was passed, on CUDA not always the
        last; after `stop()` up to the end. Empty if no loss scaler checks the gradients.
        """
        self._refresh()
        return dict(self._gradients)

    @property
    def numerics(self) -> NumericsTable:
        """Statistics of the last sampled step: print it, or read `numerics["gradients"][name]`."""
        self._refresh()
        return self._numerics if self._sampler is None else NumericsTable(self._sampler.latest)

    @property
    def ops(self) -> SampledOps:
        """The ops of the last sampled step, by module and dtype, with their casts: print it."""
        if self._ops is None:
            raise PolicyError(
                "This run does not count ops. Pass ops=True to mezzo.observe, or use"
                " mezzo.op_stats around a step."
            )
        return self._ops if self._op_sampler is None else self._op_sampler.latest

    @property
    def events(self) -> list[EventRecord]:
        """Events of mezzo since the run began, such as captured steps; equal ones once."""
        return list(self._events)

    def _refresh(self) -> None:
        self._poll(all_arrived=not self._lags)

    def __repr__(self) -> str:
        """Summarize the run. Does not synchronize."""
        self._refresh()
        started, steps = self._header, self._steps
        state = "stopped" if self._attachment is None else "running"
        lines = [
            f"Run of {started.model}, {started.policy or 'no policy'}, {started.dtype}: {state}",
            f"steps: {self._step_number}, skipped: {steps.skipped}, loss scale: {steps.scale:.10g}",
        ]
        last = steps.last()
        if last is not None and last.loss is not None:
            lines[1] += f", loss: {last.loss:.4g}"
        lines += [f"last skip: step {skip.step}, {skip.parameter}" for skip in [*steps.skips][-1:]]
        lines += _worst_gradients(self._gradients)
        if numerics := self.numerics:
            sampled = ", ".join(f"{len(tensors)} {which}" for which, tensors in numerics.items())
            lines.append(f"sampled: {sampled} (print run.numerics)")
        if self.log is not None:
            lines.append(f"log: {self.log}")
        return "\n  ".join(lines)

    # -- the end -----------------------------------------------------------------------------------

    def stop(self, reason: str = "stopped") -> None:
        """End the run, and leave model, optimizers, scaler and step as they were.

        Waits for the device once. Calling it again does nothing.
        """
        attachment = self._attachment
        if attachment is None:
            return
        self._copy_counts(attachment.number)
        if self._sampling is not None:
            self._stop_sampling(self._sampling)
        # Waits for the device, after which everything has arrived.
        attachment.detach()
        self._last_step = attachment.number
        self._poll(all_arrived=True)
        self._stack.close()
        self._numerics = self.numerics
        self._ops = None if self._op_sampler is None else self._op_sampler.latest
        self._attachment, self._sampler, self._op_sampler = None, None, None
        self.collectors = []
        self._ended = RunEnded(step=self._last_step, time=self._time(), reason=reason)
        self._write([self._ended])
        for writer in self._writers:
            writer.close()
        self._writers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop("stopped" if kind is None else f"{kind.__name__}: {error}")


def _worst_gradients(gradients: dict[str, Counts]) -> list[str]:
    """Return a line for the gradient that underflows most, and one for what overflowed."""
    total = sum(gradient.overflowed for gradient in gradients.values())
    counted = {name: counts for name, counts in gradients.items() if counts.total}
    if not counted:
        return []
    name = max(
        counted,
        key=lambda gradient_name: counted[gradient_name].underflowed / counted[gradient_name].total,
    )
    share = counted[name].underflowed / counted[name].total
    return [f"gradients: {total} values overflowed; most underflow: {name} ({share:.2%})"]
