"""Files that are there whole or not at all."""

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
    """Open a file that appears under its name only when it was written to the end.

    The bytes go to a neighbour first, are flushed to the disk and renamed over the target: a kill
    in the middle leaves the old file as it was, and the neighbour is removed by the next write to
    the same path. A disk that is full, or a limit on file sizes, raises one OSError, whatever the
    writer made of it.
    """
    # A link is followed, as open() does: the rename would replace the link itself.
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {os.fspath(path)!r}: there is no directory {os.fspath(target.parent)!r}."
            " Make it first."
        )
    if target.exists() and not target.is_file():
        raise OSError(
            f"Cannot write {os.fspath(path)!r}: it is not a regular file, and would be replaced by"
            " one. Pass the path of a file."
        )
    _remove_orphans(target)
    temporary = target.with_name(f".{target.name}.{token_hex(8)}{_PART}")
    # A plain open, and not mkstemp, whose files only their owner can read: a saved file has the
    # mode that the user's umask gives.
    raw = _RecordingFile(temporary, "xb")
    try:
        with BufferedWriter(raw) as file:
            # Some network file systems have no locks: there, what a killed writer leaves stays.
            with suppress(OSError):
                _lock(file)
            yield file
            file.flush()
            raw.sync()
            if target.exists():
                temporary.chmod(target.stat().st_mode)
            if fcntl is not None:
                # While it is locked: another writer takes an unlocked part for an orphan.
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


class _RecordingFile(FileIO):
    """A file that keeps the first error of the operating system: torch.save and zipfile replace it by errors of their own."""

    error: OSError | None = None
    written: int = 0
    """Bytes in the file when the error came."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._keep(error)
            raise

    def sync(self) -> None:
        """Flush to the disk."""
        try:
            os.fsync(self.fileno())
        except OSError as error:
            self._keep(error)
            raise

    def _keep(self, error: OSError) -> None:
        if self.error is None:
            self.error, self.written = error, os.fstat(self.fileno()).st_size


def _remove_orphans(target: Path) -> None:
    """Remove what killed writers of the same file left behind. One that is still being written is locked, and stays."""
    for part in target.parent.glob(f".{escape(target.name)}.*{_PART}"):
        with suppress(OSError):
            with part.open("rb") as file:
                _lock(file)
            part.unlink()


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed; raise OSError if another process holds the lock. Windows needs none: there an open file cannot be removed."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_writer(path) as file:
        file.write(text.encode())
