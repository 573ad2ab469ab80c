"""Read the logs of a run for reports: the records of each rank, by kind."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import MezzoError
from mezzo.observing.log import read_log
from mezzo.observing.log_values import Line, finite, step_of, tensor_stats
from mezzo.observing.records import GradientsRecord, Record, TensorsRecord
from mezzo.observing.run import Run
from mezzo.observing.skip_causes import Skip, SkipCauses

Source = str | os.PathLike[str] | Any
"""A log file, a run that `mezzo.observe` returned, or a list of either with one entry a rank."""


_UNUSUAL = re.compile(r"\\[bfru]|\x7f")
"""What JSON has in place of characters that are not plain ASCII."""


@dataclass(frozen=True)
class RankLog:
    """The records of one rank, by kind."""

    header: Line
    """The first line: model, policy, dtype, device, versions, rank."""
    records: Mapping[str, Sequence[Line]]

    @property
    def rank(self) -> int:
        """The rank that wrote the log."""
        return int(finite(self.header.get("rank")) or 0)

    def of(self, kind: str) -> Sequence[Line]:
        """Return the records of a kind, in their order."""
        return self.records.get(kind, ())

    @property
    def end(self) -> str | None:
        """Why the log ended; None if it was not closed."""
        ends = self.of("end")
        return str(ends[-1].get("reason")) if ends else None

    @cached_property
    def skips(self) -> tuple[Skip, ...]:
        """The skipped steps."""
        findings = {step_of(line): line for line in self.of("finding")}
        causes = SkipCauses(self.rank, findings)
        return tuple(skip for line in self.of("step") if (skip := causes.add(line)) is not None)


@dataclass(frozen=True)
class RunData:
    """The logs of all ranks of a run that are there, in the order of ranks."""

    ranks: tuple[RankLog, ...]

    @property
    def header(self) -> Line:
        """The header of the first rank."""
        return self.ranks[0].header

    @property
    def policy(self) -> str | None:
        """The policy of the run; None for torch's own op lists."""
        return self._setting("policy")

    @property
    def dtype(self) -> str | None:
        """The dtype that ops compute in.

        That of a region inside the model is read from the sampled activations: only a region around
        the model is an event.
        """
        found = self._setting("dtype")
        halves = {dtype_name(dtype) for dtype in HALF_DTYPES}
        sampled = self.activation_dtypes & halves
        is_inside = self.header.get("policy") is None and found not in halves
        return min(sampled) if sampled and is_inside else found

    @cached_property
    def activation_dtypes(self) -> frozenset[str]:
        """The dtypes of all sampled activations; empty without samples, as of a compiled model."""
        return frozenset(
            str(stats.get("dtype"))
            for line in self.of("tensors")
            if line.get("which") == "activations"
            for _, stats in tensor_stats(line)
        )

    def _setting(self, name: str) -> str | None:
        """Return a field of the header.

        Without a policy the header has the dtype of the parameters: a region is an event.
        """
        regions = [
            line["fields"].get(name)
            for line in self.of("event")
            if line.get("name") == "PolicyResolved" and isinstance(line.get("fields"), dict)
        ]
        is_known = self.header.get("policy") is not None or not regions
        found = self.header.get(name) if is_known else regions[0]
        return str(found) if found else None

    @property
    def world_size(self) -> int:
        """How many ranks the run had, with or without a log."""
        return max(len(self.ranks), int(finite(self.header.get("ranks")) or 1))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks without a log."""
        return tuple(sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks}))

    @property
    def steps(self) -> int:
        """The number of the last step."""
        steps = [step_of(line) for rank in self.ranks for line in rank.of("step")]
        return max((step for step in steps if step is not None), default=0)

    @property
    def seconds(self) -> float:
        """The time of the last record, since the run began."""
        return max(
            (
                finite(lines[-1].get("time")) or 0.0
                for rank in self.ranks
                for lines in rank.records.values()
            ),
            default=0.0,
        )

    @cached_property
    def skips(self) -> tuple[Skip, ...]:
        """The skipped steps of all ranks, by step; one that all ranks skipped is listed once.

        That is with the rank whose loss was not finite, if one was: it made the others skip.
        """
        found: dict[tuple[int, str | None], Skip] = {}
        for rank in self.ranks:
            for skip in rank.skips:
                first = found.setdefault((skip.step, skip.parameter), skip)
                if _is_bad(skip.loss) and not _is_bad(first.loss):
                    found[skip.step, skip.parameter] = skip
        return tuple(sorted(found.values(), key=lambda skip: (skip.step, skip.rank)))

    def with_records(self, lines: Iterable[Line]) -> RunData:
        """Return the run with further records of its first rank."""
        first, *others = self.ranks
        records = {kind: list(known) for kind, known in first.records.items()}
        for line in map(_printable, lines):
            records.setdefault(str(line["kind"]), []).append(line)
        return RunData((replace(first, records=records), *others))

    def of(self, kind: str) -> list[Line]:
        """Return the records of a kind of all ranks."""
        return [line for rank in self.ranks for line in rank.of(kind)]


def read_run(source: Source) -> RunData:
    """Read the log of a run. Of a run with ranks, the logs of those that have one.

    `source` is a log file, the result of `mezzo.observe`, or a list of either. A path whose ranks
    wrote files of their own (`run.rank0.jsonl` for `run.jsonl`) reads all of them.
    """
    if isinstance(source, RunData):
        return source
    parts: Iterable[Source] = source if isinstance(source, list | tuple) else [source]
    logs = [_by_kind(lines) for part in parts for lines in _lines(part)]
    if not logs:
        raise MezzoError("write_report() got an empty list of logs. Pass at least one log file.")
    return RunData(tuple(sorted(logs, key=lambda log: log.rank)))


def _lines(source: Source) -> list[list[dict[str, Any]]]:
    if not isinstance(source, str | os.PathLike):
        return [_lines_of_run(source)]
    path = Path(source)
    if path.exists():
        return [read_log(path)]
    ranks = sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))
    if not ranks:
        raise MezzoError(
            f"There is no log {str(path)!r}, and no log of a rank such as"
            f" {f'{path.stem}.rank0{path.suffix}'!r}. Pass the path that was passed as log= or"
            " --log."
        )
    return [read_log(rank) for rank in ranks]


def _lines_of_run(run: Any) -> list[dict[str, Any]]:
    """Return the records of a run: those of its log, or without one what it keeps in memory."""
    if not isinstance(run, Run):
        raise MezzoError(
            "A report is made from a log file, or from what mezzo.observe() returned, not from"
            f" {type(run).__name__!r}. Pass the path of the log."
        )
    steps = run.steps
    if run.log is not None:
        return read_log(run.log)
    last = steps[-1].step if steps else None
    records: list[Record] = [run._header, *steps, *run.events]
    if run.gradients:
        records.append(GradientsRecord(step=last, layers=run.gradients))
    records += [
        TensorsRecord(step=last, which=which, stats=stats) for which, stats in run.numerics.items()
    ]
    if run._ended is not None:
        records.append(run._ended)
    return [record.to_json() for record in records]


def _is_bad(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _by_kind(lines: Iterable[Line]) -> RankLog:
    records: defaultdict[str, list[Line]] = defaultdict(list)
    for line in map(_printable, lines):
        records[str(line.get("kind"))].append(line)
    return RankLog(records["run"][0], dict(records))


def _printable(line: Line) -> Line:
    """Return a record whose texts can be shown: control characters would act on a terminal."""
    # Few records have any, and JSON finds them faster than a walk through their numbers.
    is_unusual = _UNUSUAL.search(json.dumps(line, default=str)) is not None
    return _with_escapes(line) if is_unusual else line


def _with_escapes(value: Any) -> Any:
    r"""Return plain data with escapes for characters that cannot be shown.

    >>> _with_escapes({"reason": "\x1b[2J"})
    {'reason': '\\x1b[2J'}
    """
    if isinstance(value, dict):
        return {_with_escapes(name): _with_escapes(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_escapes(item) for item in value]
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in value
    )
