"""Where a step waits for the device: found by letting torch warn of it, and named by the line of the user's code."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_SAID_BY_TORCH = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
_OURS = Path(__file__).parents[1]
_STEP, _NOTING = str(_OURS / "step"), (__file__, warnings.__file__)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(_OURS), str(Path(warnings.__file__).parent))


@contextmanager
def watching() -> Iterator[list[str]]:
    """Collect the lines that read from the device, in the order in which they do. Nothing is stopped: the step that is watched is a real one."""
    found: list[str] = []
    others: list[warnings.WarningMessage] = []

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
        if _SAID_BY_TORCH in str(message):
            found.append(users_line(traceback.extract_stack()))
        elif _PROTOTYPE not in str(message):
            others.append(warnings.WarningMessage(message, category, filename, lineno, file, line))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for other in others:
        warnings.warn_explicit(str(other.message), other.category, other.filename, other.lineno)


def users_line(stack: traceback.StackSummary) -> str:
    """The innermost line within a step that is neither torch's nor ours; where there is none, the innermost at all."""
    inner = [frame for frame in stack if frame.filename not in _NOTING and not frame.filename.startswith("<")]
    for frame in reversed(inner):
        if frame.filename.startswith(_STEP):
            break
        if not frame.filename.startswith(_NOT_THE_USERS):
            return _said(frame)
    return _said(inner[-1]) if inner else "a line that is not in a file"


def _said(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
