"""The log of a run: JSON Lines with a version, written as it runs and read up to any damage."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from mezzo._errors import MezzoError, PolicyError, user_stack_level
from mezzo.observing.records import VERSION, Record, StepRecord, is_important

Line = dict[str, Any]
"""One record of a log as plain data: `kind`, `step`, `time` and the fields of its kind."""

_FULL_STEPS = 1000
"""Steps that are all logged; then every 10th of the first 10 000, every 100th of 100 000, ..."""

_TOGETHER = 32
"""The largest number of steps that are written after these, of those that arrive together."""


class LogWriter:
    """Writes records to a log file, a line each, complete after every call.

    The size is bounded: step records become rarer (all of the first 1000, every 10th up to 10 000,
    every 100th up to 100 000, ...), and each time the log has used half of what was left of
    `max_bytes`, all but every fourth of the records so far is left out from then on. Of steps that
    take less than some milliseconds fewer are written: a line takes as long as one of them. Skipped
    steps, gradients that overflowed and events are always written.
    """

    _open: ClassVar[WeakValueDictionary[Path, LogWriter]] = WeakValueDictionary()
    """The writers of this process that have not been closed, by their file."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        before = self._open.get(path.resolve())
        if before is not None:
            before._end(f"{path} is that of a new run now. The log of the run before ends here.")
        if path.is_file():
            # Another process may be writing it: that one keeps its file, which has no name then.
            with suppress(OSError):
                path.resolve().unlink()
        self._file = path.open("w", encoding="utf-8")
        self._open[path.resolve()] = self
        self._has_begun = False
        self._size, self._max_bytes = 0, max_bytes
        self._next_limit = max_bytes / 2
        self._interval = 1
        self._offered: dict[str, int] = {}

    def write(self, records: list[Record]) -> None:
        """Write records, or as many of them as the size allows, and flush."""
        self._write_lines(
            (json.dumps(record.to_json()), not is_important(record))
            for record in records
            if is_important(record) or self._is_due(record)
        )

    def write_steps(self, steps: list[Line]) -> None:
        """Write records of steps, passed as their fields."""
        due = [step for step in steps if step["skipped"] or self._is_step_due(step["step"])]
        lines = _dumps([{"kind": StepRecord.kind, **step} for step in due])
        optional = [not step["skipped"] for step in due]
        self._write_lines(zip(lines, optional, strict=True))

    def step_interval(self, step: int, together: int = 1) -> int:
        """Return n if every n-th step that was not skipped is written, from this step on."""
        return step_interval(step, together) * self._interval

    def _is_step_due(self, step: int) -> bool:
        return step % self.step_interval(step) == 0

    def _is_due(self, record: Record) -> bool:
        if isinstance(record, StepRecord):
            return record.step is None or self._is_step_due(record.step)
        # Write all kinds of samples of a step, or none.
        name = f"{record.kind} {getattr(record, 'which', '')}"
        self._offered[name] = self._offered.get(name, -1) + 1
        return self._offered[name] % self._interval == 0

    def _write_lines(self, lines: Iterable[tuple[str, bool]]) -> None:
        """Write lines, some of them optional. After the first lines a full disk only warns."""
        if self._file.closed:
            return
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._end(f"{self.path} was removed or written anew: the log of this run ends.")
                return
            for line, optional in lines:
                self._add(line + "\n", optional=optional)
            self._file.flush()
        except OSError as error:
            if not self._has_begun:
                self.close()
                raise
            reason = error.strerror or error
            self._end(f"{self.path}: {reason}. The log ends here, and the training goes on.")
        self._has_begun = True

    def _add(self, line: str, *, optional: bool) -> None:
        if optional and self._size + len(line) > self._max_bytes:
            return
        self._file.write(line)
        self._size += len(line)
        if optional and self._size > self._next_limit:
            self._next_limit = (self._size + self._max_bytes) / 2
            self._interval *= 4

    def _end(self, message: str) -> None:
        self.close()
        warnings.warn(message, UserWarning, stacklevel=user_stack_level())

    def close(self) -> None:
        """Close the file."""
        if self._open.get(self.path.resolve()) is self:
            del self._open[self.path.resolve()]
        # Closing writes what is still buffered, and a full disk was reported.
        with suppress(OSError):
            self._file.close()


def _dumps(lines: list[Line]) -> list[str]:
    """Return the JSON of each line, by one call for all: each one takes longer than its line.

    >>> _dumps([{"a": 1}, {"a": None}])
    ['{"a": 1}', '{"a": null}']
    """
    texts = json.dumps(lines)[1:-1].replace("}, {", "}\n{").split("\n")
    return texts if len(texts) == len(lines) else [json.dumps(line) for line in lines]


def step_interval(step: int, together: int = 1) -> int:
    """Return n if every n-th step is logged at this step.

    If many steps arrive `together` they are short, and fewer are logged.

    >>> [step_interval(step) for step in (1, 1000, 1001, 10_000, 10_001)]
    [1, 1, 10, 10, 100]
    """
    interval = 1
    while step > _FULL_STEPS * interval:
        interval *= 10
    while 1 < interval < together / _TOGETHER:
        interval *= 10
    return interval


def read_log(path: str | os.PathLike[str]) -> list[Line]:
    """Return the records of a log, also of one that is still being written.

    A line that is cut off or damaged ends the reading, with one warning; what is before it is
    returned. Kinds and fields that this version of mezzo does not have are returned as they are.

    Args:
        path: The file that `mezzo.observe(..., log=path)` writes.

    Returns:
        A dictionary for each line: `kind`, `step`, `time` and the fields of that kind.

    Raises:
        MezzoError: The path is a folder, or the file is not a log of mezzo, or of a newer format.

    >>> import mezzo, tempfile, torch
    >>> path = tempfile.mktemp(suffix=".jsonl")
    >>> model = torch.nn.Linear(2, 1)
    >>> with mezzo.observe(model, log=path):
    ...     output = model(torch.ones(1, 2))
    >>> [line["kind"] for line in mezzo.read_log(path)][0]
    'run'
    """
    path = Path(path)
    if path.is_dir():
        logs = [repr(log.name) for log in sorted(path.glob("*.jsonl"))]
        raise MezzoError(
            f"{str(path)!r} is a folder, not a log. It holds"
            f" {', '.join(logs[:5]) or 'no .jsonl file'}. Pass the path that was passed as log= or"
            " --log."
        )
    lines: list[Line] = []
    for number, text in enumerate(_raw_lines(path), 1):
        line = _parse(text)
        if line is None and not lines:
            break
        if line is None:
            warnings.warn(
                f"{path} is damaged or cut off at line {number}: the {len(lines)} records before"
                " it were read.",
                UserWarning,
                stacklevel=2,
            )
            break
        if not lines:
            _check_header(path, line)
        lines.append(line)
    if not lines:
        raise MezzoError(
            f"{path} has no complete first line, so it is not a log of mezzo.observe. Pass the path"
            " that was passed as log=."
        )
    return lines


def _raw_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _parse(text: bytes) -> Line | None:
    """Return the record of a line, None if it is damaged; a line without an end is cut off."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(line, dict) and isinstance(line.get("kind"), str)
    return line if is_record and text.endswith(b"\n") else None


def _check_header(path: Path, line: Line) -> None:
    if line["kind"] != "run":
        raise MezzoError(
            f"{path} begins with a record of kind {line['kind']!r}, so it is not a log of"
            " mezzo.observe, which begins with 'run'. Pass the path that was passed as log=."
        )
    version = line.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise MezzoError(
            f"{path} has version {version!r} of the log format, and this mezzo reads up to"
            f" {VERSION}. Update mezzo."
        )


def log_path(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Return the file of a rank: with several ranks, `run.jsonl` becomes `run.rank1.jsonl`.

    >>> log_path("run.jsonl", 0, 1).name, log_path("run.jsonl", 1, 2).name
    ('run.jsonl', 'run.rank1.jsonl')
    """
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise PolicyError(
            f"log={str(path)!r} is no file in an existing folder. Pass the path of a file, such as"
            " log='run.jsonl', and make its folder first."
        )
    return path if ranks == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
