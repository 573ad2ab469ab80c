"""Find the line of the user's code that runs now."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

from mezzo._errors import MEZZO_FOLDER, TORCH_FOLDER

_LIBRARIES = (TORCH_FOLDER, MEZZO_FOLDER, "<")
"""Prefixes of the files whose frames are not the user's. Compiled code has names in brackets."""


def user_line(caller: CodeType | None = None) -> str:
    """Return the file and line of the user's code that runs now; empty if there is none.

    Frames below one of the code `caller` do not count: they call mezzo and are not what runs.

    >>> user_line(user_line.__code__)
    ''
    """
    frame, _ = _user_frame(caller)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def user_line_level() -> int:
    """Return the `stacklevel` with which the caller warns at `user_line()`; 1 if there is none."""
    frame, level = _user_frame(None)
    return 1 if frame is None else level - 2


def _user_frame(caller: CodeType | None) -> tuple[FrameType | None, int]:
    """Return the innermost frame of the user's code, and its distance from here, from 1."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code is not caller:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return frame, level
        frame, level = frame.f_back, level + 1
    return None, level
