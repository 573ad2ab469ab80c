"""Explain errors of ops that refuse 16-bit tensors with float32 ones, or with large numbers.

Most ops promote mixed dtypes, or are in torch's lists and cast their inputs. A few, such as
`index_add`, raise; torch's message then says neither what to change nor, often, which op it was.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from pathlib import Path

import torch

from mezzo._dtypes import dtype_name
from mezzo._errors import MEZZO_FOLDER, TORCH_FOLDER, MezzoError, UnsupportedError
from mezzo.autocasting.float32_fallback import means_missing_kernel
from mezzo.policy.registry import registry

_MIXED_DTYPES = re.compile(
    r"half|bfloat16|mixed dtype|inputs should have same dtype|self\.dtype to be equal to src",
    flags=re.IGNORECASE,
)
"""Found in torch's messages about 16-bit and float32 tensors."""
_OUT_OF_RANGE = re.compile(r"converted to type (?:c10|at)::(Half|BFloat16) without overflow")
"""Found in torch's messages about a number such as -1e9, which masks a 16-bit tensor."""
_SPARSE = "sparse."
_OTHER_DTYPES = re.compile(r"long|\bint\b", flags=re.IGNORECASE)
"""Found in messages about a floating-point index."""


def explain_forward(error: RuntimeError) -> UnsupportedError | None:
    """Return an error that names the op and the remedy; None if dtypes were not the cause."""
    if (found := _OUT_OF_RANGE.search(str(error))) is not None:
        return _explain_out_of_range(error, getattr(torch, found[1].lower()))
    if not _mixes_dtypes(error) or _OTHER_DTYPES.search(str(error)):
        return None
    call = _failed_call(error)
    if call is None:
        return None
    op, message = call.rstrip("_"), str(error).splitlines()[0]
    if call.startswith(_SPARSE):
        return UnsupportedError(
            f"torch.{call} got 16-bit and float32 tensors, which it does not accept ({message}). No"
            " policy acts on it: run the module that calls it in float32, with"
            " modules={name: 'full'}; or call it with float32 inputs where autocast is disabled."
        )
    if means_missing_kernel(error):
        return UnsupportedError(
            f"{call} has no 16-bit kernel on this device ({message}). To go on,"
            f" {_in_float32(call)}."
        )
    if call != op:
        return UnsupportedError(
            f"{call} writes values of one dtype into a tensor of another, which it does not accept"
            f" ({message}). Cast the values in the model, with .to(tensor.dtype); or call {op},"
            f" which returns a new tensor, and pass promote={{{op!r}}}. If a module of a package"
            " calls it, run that one in float32, with modules={name: 'full'}."
        )
    return UnsupportedError(
        f"{op} got 16-bit and float32 tensors, which it does not accept ({message}). Pass"
        f" promote={{{op!r}}} to run it in the widest dtype of its inputs; or, if one of them is a"
        " parameter, keep it float32 with keep_full=."
    )


def _explain_out_of_range(error: RuntimeError, dtype: torch.dtype) -> UnsupportedError:
    call = _failed_call(error)
    return UnsupportedError(
        f"{call or 'An op'} got a number that {dtype_name(dtype)} cannot hold: its largest is"
        f" {torch.finfo(dtype).max:g}. In the model write float('-inf') or"
        " torch.finfo(tensor.dtype).min instead of a number such as -1e9."
        + ("" if call is None else f" Or {_in_float32(call)}.")
    )


def _in_float32(call: str) -> str:
    op = call.rstrip("_")
    instead = "pass" if call == op else f"call {op}, which returns a new tensor, and pass"
    return f"{instead} full={{{op!r}}} to run it in float32"


def explain_backward(error: RuntimeError) -> UnsupportedError | None:
    """Return an error with the remedy if the backward of a function or of an op mixed dtypes.

    The forward of an autograd.Function runs in autocast and may save 16-bit tensors along with
    float32 ones. Its backward runs without autocast.
    """
    if not _mixes_dtypes(error):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (frame for frame in frames if frame.name == "backward" and not _is_inside(frame)), None
    )
    if frame is None and "expected scalar type" in str(error):
        return UnsupportedError(
            f"The backward of an op got 16-bit and float32 tensors ({str(error).splitlines()[0]})."
            " torch.sparse.mm(a, b) is such an op: write a @ b, which is not. Others are named by"
            " torch.autograd.set_detect_anomaly(True)."
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
    >>> _called("torch.linalg.norm(x, 'nuc')")
    'linalg_norm'
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
    package = ast.unparse(function).split(".")[-2:-1]
    if package and f"{package[0]}_{name}" in registry().names:
        return f"{package[0]}_{name}"
    return name if name.rstrip("_") in registry().names else None
