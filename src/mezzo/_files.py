"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PART = ".part"


@contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when it was written to the end.

    The bytes go to a neighbour first, are flushed to the disk and renamed over the target: a kill in the middle leaves the old file as it was, and the neighbour is
    removed by the next write to the same path.
    """
    # A link is followed, as open() does: the rename would replace the link itself.
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot write {os.fspath(path)!r}: there is no directory {os.fspath(target.parent)!r}. Make it first.")
    if target.exists() and not target.is_file():
        raise OSError(f"Cannot write {os.fspath(path)!r}: it is not a regular file, and would be replaced by one. Pass the path of a file.")
    _remove_orphans(target)
    temporary = target.with_name(f".{target.name}.{token_hex(8)}{_PART}")
    try:
        # A plain open, and not mkstemp, whose files only their owner can read: a saved file has the mode that the user's umask gives.
        with temporary.open("xb") as file:
            # Some network file systems have no locks: there, what a killed writer leaves stays.
            with suppress(OSError):
                _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode)
            if fcntl is not None:
                # While it is locked: another writer takes an unlocked part for an orphan.
                temporary.replace(target)
        if fcntl is None:
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
