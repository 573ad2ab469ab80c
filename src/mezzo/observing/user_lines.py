"""Find the line of the user's code that runs now."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Prefixes of the files whose frames are not the user's. Compiled code has names in brackets."""


def user_line(caller: CodeType | None = None) -> str:
    """Return the file and line of the user's code that runs now; empty if there is none.

    Frames below one of the code `caller` do not count: they call mezzo and are not what runs.

    >>> user_line(user_line.__code__)
    ''
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not caller:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
