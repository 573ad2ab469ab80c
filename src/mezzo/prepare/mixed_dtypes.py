"""Explain errors of ops that do not accept 16-bit parameters, or a number beyond float16.

Most ops promote mixed dtypes, or are in torch's lists and cast their inputs. A few, such as
`index_add`, raise; torch's message then says neither what to change nor, often, which op it was.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from pathlib import Path

from mezzo._errors import MEZZO_FOLDER, TORCH_FOLDER, MezzoError, UnsupportedError
from mezzo.policy.registry import registry

_MIXED_DTYPES = re.compile(
    r"half|bfloat16|mixed dtype|inputs should have same dtype|self\.dtype to be equal to src",
    flags=re.IGNORECASE,
)
"""Found in torch's messages about 16-bit and float32 tensors."""
_OUT_OF_RANGE = re.compile(r"value cannot be converted to type \S*Half without overflow")
"""Found in the message about a number such as -1e9, which is beyond the range of float16."""
_SPARSE = "sparse."
_OTHER_DTYPES = re.compile(r"long|\bint\b", flags=re.IGNORECASE)
"""Found in messages about a floating-point index."""


def explain_mixed_dtypes(error: RuntimeError) -> UnsupportedError | None:
    """Return an error that names the op and the remedy; None if dtypes were not the cause."""
    if not _mixes_dtypes(error) or _OTHER_DTYPES.search(str(error)):
        return None
    call = _failed_call(error)
    if call is None:
        return None
    op, message = call.rstrip("_"), str(error).splitlines()[0]
    if _OUT_OF_RANGE.search(message):
        rule = "" if call != op or "full" in op else f"; or pass full={{{op!r}}}"
        return UnsupportedError(
            f"{call} got a number that float16 cannot hold ({message}). Write"
            f" torch.finfo(x.dtype).min or .max of its tensor in place of the number{rule}; or use"
            " dtype='bfloat16'."
        )
    if call.startswith(_SPARSE):
        return UnsupportedError(
            f"torch.{call} got 16-bit and float32 tensors, which it does not accept ({message}). No"
            " policy acts on it: run the module that calls it in float32, with"
            " modules={name: 'full'}; or call it with float32 inputs where autocast is disabled."
        )
    if call != op:
        return UnsupportedError(
            f"{call} writes values of one dtype into a tensor of another, which it does not accept"
            f" ({message}). Cast the values in the model, with .to(tensor.dtype); or call {op},"
            f" which returns a new tensor, and pass promote={{{op!r}}}."
        )
    return UnsupportedError(
        f"{op} got 16-bit and float32 tensors, which it does not accept ({message}). Pass"
        f" promote={{{op!r}}} to run it in the widest dtype of its inputs; or, if one of them is a"
        " parameter, keep it float32 with keep_full=."
    )


def explain_backward(error: RuntimeError) -> UnsupportedError | None:
    """Return an error with the remedy if the backward of an autograd.Function mixed dtypes.

    Its forward runs in autocast and may save 16-bit tensors along with float32 ones. Its backward
    runs without autocast.
    """
    if not _mixes_dtypes(error):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (frame for frame in frames if frame.name == "backward" and not _is_inside(frame)), None
    )
    if frame is None:
        return None
    return UnsupportedError(
        f"The backward of an autograd.Function ({Path(frame.filename).name}:{frame.lineno}) got"
        f" 16-bit and float32 tensors ({str(error).splitlines()[0]}), since it runs without"
        " autocast. Decorate its forward with @torch.amp.custom_fwd(device_type=...) and its"
        " backward with @torch.amp.custom_bwd(device_type=...); or, if it reads 16-bit parameters,"
        " keep them float32 with keep_full=."
    )


def _mixes_dtypes(error: RuntimeError) -> bool:
    """Return whether an error is one of torch's about 16-bit and float32 tensors."""
    return not isinstance(error, MezzoError) and _MIXED_DTYPES.search(str(error)) is not None


def _is_inside(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame runs code of mezzo or torch."""
    return frame.filename.startswith((MEZZO_FOLDER, TORCH_FOLDER))


def _failed_call(error: RuntimeError) -> str | None:
    """Return the op whose call raised, as the code names it.

    Modes call an op from frames of mezzo and torch, inside the frame of the code.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        call = _called(_expression(frame))
        if call is not None or not _is_inside(frame):
            return call
    return None


def _expression(frame: traceback.FrameSummary) -> str:
    """Return the expression that a frame was computing; empty if it is not known."""
    first, last, start, end = frame.lineno, frame.end_lineno, frame.colno, frame.end_colno
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [
        linecache.getline(frame.filename, number).encode() for number in range(first, last + 1)
    ]
    # The columns count bytes.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")


def _called(expression: str) -> str | None:
    """Return the op that an expression calls; an expression with an index writes there.

    Functions of `torch.sparse` are no ops of policies.

    >>> _called("table.index_add_(0, index, source)"), _called("x + y"), _called("self.head(x)")
    ('index_add_', None, None)
    >>> _called("table[index]")
    'index_put_'
    """
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        return None
    if isinstance(node, ast.Subscript):
        return "index_put_"
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if ast.unparse(function).endswith(f"{_SPARSE}{name}"):
        return _SPARSE + name
    return name if name.rstrip("_") in registry().names else None
