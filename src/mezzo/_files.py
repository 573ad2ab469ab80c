"""Atomic file writes: a file is complete, or it does not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from io import BufferedWriter, FileIO
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PART = ".part"


@contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only when the block ends.

    The bytes go to a temporary file in the same folder, are flushed to the disk and renamed over
    the target. A killed process leaves the old file as it was; the next write to the same path
    removes the temporary file. A full disk and a limit on file sizes raise one OSError, whatever
    torch.save or zipfile raise for it.
    """
    target = _check_target(path)
    _remove_orphans(target)
    temporary = target.with_name(f".{target.name}.{token_hex(8)}{_PART}")
    # Not mkstemp, whose files only their owner can read: a saved file gets its mode from the umask.
    raw = _RecordingFile(temporary, "xb")
    try:
        with BufferedWriter(raw) as file:
            # Some network file systems have no locks: there the temporary file of a killed process
            # is not removed.
            with suppress(OSError):
                _lock(file)
            yield file
            file.flush()
            raw.sync()
            if target.exists():
                temporary.chmod(target.stat().st_mode)
            if fcntl is not None:
                # Before the lock is released: another writer would remove an unlocked one.
                temporary.replace(target)
        if fcntl is None:
            temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if raw.error is None or not isinstance(error, Exception):
            raise
        raise OSError(
            raw.error.errno,
            f"Cannot write {os.fspath(path)!r}: {raw.error.strerror}, after {raw.written} bytes."
            " What was at this path before is unchanged. Free disk space, or raise the limit on"
            " file sizes (ulimit -f), and save again",
        ) from raw.error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_writer(path) as file:
        file.write(text.encode())


class _RecordingFile(FileIO):
    """A file that records the first OSError: torch.save and zipfile replace it by other errors."""

    error: OSError | None = None
    written: int = 0
    """Size of the file when the error occurred."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._record(error)
            raise

    def sync(self) -> None:
        """Flush to the disk."""
        try:
            os.fsync(self.fileno())
        except OSError as error:
            self._record(error)
            raise

    def _record(self, error: OSError) -> None:
        if self.error is None:
            self.error, self.written = error, os.fstat(self.fileno()).st_size


def _check_target(path: str | os.PathLike[str]) -> Path:
    """Return the path to write; raise OSError if it cannot be a file."""
    # Follow links, as open() does: the rename would replace the link itself.
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {os.fspath(path)!r}: there is no directory {os.fspath(target.parent)!r}."
            " Create it first."
        )
    if target.exists() and not target.is_file():
        raise OSError(
            f"Cannot write {os.fspath(path)!r}: it is not a regular file, and would be replaced by"
            " one. Pass the path of a file."
        )
    return target


def _remove_orphans(target: Path) -> None:
    """Remove temporary files that killed processes left. One that is being written is locked."""
    for part in target.parent.glob(f".{escape(target.name)}.*{_PART}"):
        with suppress(OSError):
            with part.open("rb") as file:
                _lock(file)
            part.unlink()


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed; raise OSError if another process holds the lock.

    Windows needs no lock: an open file cannot be removed there.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
