"""`mezzo.latest_checkpoint`: find the last complete checkpoint in a folder."""

from __future__ import annotations

import re
from pathlib import Path

from mezzo._errors import CheckpointError
from mezzo.prepare import checkpoint_file, checkpoint_folder
from mezzo.prepare.checkpoint_parts import FORMAT, FilePath


def latest_checkpoint(folder: FilePath) -> Path | None:
    """Return the checkpoint in a folder that was saved last; None if there is none.

    What is not complete is left out: a save that was interrupted, a file that is being copied.
    Other files are left out too. Of checkpoints that were saved at the same time, the one with the
    larger number in its name counts as later.

    Args:
        folder: The folder that holds the files or folders of `save_checkpoint`. It need not exist.

    >>> import mezzo, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         mezzo.save_checkpoint(f"{folder}/{step}.pt", torch.nn.Linear(1, 1))
    ...     mezzo.latest_checkpoint(folder).name
    '10.pt'
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{str(path)!r} is a file. Pass the folder that holds checkpoints.")
    entries = path.iterdir() if path.is_dir() else ()
    for entry in sorted(filter(_is_visible, entries), key=_age, reverse=True):
        if _is_complete(entry):
            return entry
    return None


def _is_visible(entry: Path) -> bool:
    return not entry.name.startswith(".")


def _age(entry: Path) -> tuple[int, list[int], str]:
    """Return when an entry was written, and the numbers in its name."""
    numbers = [int(one) for one in re.findall(r"\d+", entry.name)]
    try:
        return entry.stat().st_mtime_ns, numbers, entry.name
    except OSError:
        # Removed since the folder was listed.
        return 0, numbers, entry.name


def _is_complete(entry: Path) -> bool:
    if not entry.is_file():
        return checkpoint_folder.is_complete(entry)
    with entry.open("rb") as file:
        return checkpoint_file.is_complete(file, FORMAT)
