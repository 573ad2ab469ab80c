"""Explain the errors of ops that do not accept 16-bit parameters together with float32.

Most ops promote mixed dtypes, or are in torch's lists and cast their inputs. A few, such as
`index_add`, raise; torch's message then says neither what to change nor, often, which op it was.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback

from mezzo._errors import MezzoError, UnsupportedError
from mezzo.policy.registry import registry

_MIXED_DTYPES = re.compile(
    r"half|bfloat16|mixed dtype|inputs should have same dtype|self\.dtype to be equal to src",
    flags=re.IGNORECASE,
)
"""Found in torch's messages about 16-bit and float32 tensors."""
_OTHER_DTYPES = re.compile(r"long|\bint\b", flags=re.IGNORECASE)
"""Found in messages about a floating-point index."""


def explain_mixed_dtypes(error: RuntimeError) -> UnsupportedError | None:
    """Return an error that names the op and the remedy; None if dtypes were not the cause."""
    if isinstance(error, MezzoError) or not _MIXED_DTYPES.search(str(error)):
        return None
    if _OTHER_DTYPES.search(str(error)):
        return None
    op = _failed_op(error)
    if op is None:
        return None
    message = str(error).splitlines()[0]
    return UnsupportedError(
        f"{op} got 16-bit and float32 tensors, which it does not accept ({message}). Pass"
        f" promote={{{op!r}}} to run it in the widest dtype of its inputs; or, if one of them is a"
        " parameter, keep it float32 with keep_full=."
    )


def _failed_op(error: RuntimeError) -> str | None:
    """Return the op whose call raised, by the expression in the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    frame = frames[-1]
    first, last, start, end = frame.lineno, frame.end_lineno, frame.colno, frame.end_colno
    if first is None or last is None or start is None or end is None:
        return None
    lines = [
        linecache.getline(frame.filename, number).encode() for number in range(first, last + 1)
    ]
    # The columns count bytes.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return _called(b"".join(lines).decode(errors="replace"))


def _called(expression: str) -> str | None:
    """Return the op that an expression calls.

    >>> _called("table.index_add_(0, index, source)"), _called("x + y"), _called("self.head(x)")
    ('index_add', None, None)
    """
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    name = name.rstrip("_")
    return name if name in registry().names else None
