"""Where in the model's source a node comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in \S+)?')
_TORCH = str(Path(torch.__file__).parent)


def own_frame(trace: str | None) -> re.Match[str] | None:
    """The line of a traceback that called an op: the last that is not torch's, or torch's last where there is no other."""
    frames = [frame for frame in _FRAME.finditer(trace or "") if not frame[1].startswith("<")]
    own = [frame for frame in frames if not frame[1].startswith(_TORCH)] or frames
    return own[-1] if own else None


def source_line(node: Node) -> str:
    """The file and line of a node's call, or nothing: `model.py:12`."""
    frame = own_frame(node.meta.get("stack_trace"))
    return f"{Path(frame[1]).name}:{frame[2]}" if frame else ""
