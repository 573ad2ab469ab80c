"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


@contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when it was written to the end.

    The bytes go to a neighbour first, are flushed to the disk and renamed over the target: a kill in the middle leaves the old file as it was.
    """
    # A link is followed, as open() does: the rename would replace the link itself.
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot write {os.fspath(path)!r}: there is no directory {os.fspath(target.parent)!r}. Make it first.")
    temporary = target.with_name(f".{target.name}.{token_hex(8)}.part")
    try:
        # A plain open, and not mkstemp, whose files only their owner can read: a saved file has the mode that the user's umask gives.
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_writer(path) as file:
        file.write(text.encode())
