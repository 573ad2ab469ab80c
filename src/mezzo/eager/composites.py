"""Python functions of torch that are made of several ops: which ops are inside, and how to run them so that each is seen.

Under a TorchFunctionMode such a function arrives as one call, and the ops inside escape. Its body, run with the question
"does anybody override this?" answered no, makes its inner calls one by one, and the mode sees each.
"""

from __future__ import annotations

import dis
import inspect
import warnings
from functools import cache
from types import FunctionType
from typing import Any, cast

from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from mezzo._torch import boolean_dispatched
from mezzo.eager import bodies
from mezzo.policy.names import canonical
from mezzo.policy.registry import Function, registry

_OPERATORS = {"+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floor_divide", "%": "remainder", "**": "pow", "@": "matmul"}
_UNARY = {"UNARY_NEGATIVE": "neg"}
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_AROUND_ONE = frozenset({"einsum", "stft", "tensordot", "unique", "unique_consecutive"})
"""Ops whose Python function checks and rearranges what it passes on. The arithmetic in them is about sizes, and the function inside may ask in their name."""
_DEPTH = 3


@cache
def ops_inside(function: Function) -> frozenset[str]:
    """Name every op that a Python function may call, read from its bytecode: too many rather than too few.

    Comparisons are left out: in torch's functions they compare sizes, and their results carry no precision.

    >>> import torch.nn.functional as F
    >>> sorted(ops_inside(F.softsign))
    ['abs', 'add', 'div', 'softsign']
    """
    return frozenset(_read(cast("FunctionType", function), _DEPTH)) if has_body(function) else frozenset()


def has_body(function: Function) -> bool:
    """Whether a function is written in Python, and not a builtin or a thin wrapper around one."""
    return isinstance(function, FunctionType) and isinstance(inspect.unwrap(function), FunctionType)


def can_open(name: str, function: Function) -> bool:
    """Whether an op's function has a body to look into.

    >>> import torch
    >>> can_open("normalize", torch.nn.functional.normalize), can_open("einsum", torch.einsum), can_open("add", torch.add)
    (True, False, False)
    """
    return has_body(function) and name not in _AROUND_ONE


@cache
def body(function: Function) -> Function:
    """A copy of a composite that no longer asks whether somebody overrides it, so that its inner calls can be seen."""
    inner = _unwrapped(function)
    made = _choice(inner) if inner in boolean_dispatched else _copy(inner)
    setattr(bodies, body_name(function), made)
    return made


def _copy(function: FunctionType) -> Function:
    code = function.__code__
    if function.__module__ != F.__name__:
        # Dynamo goes by files, and traces nothing of `torch/functional.py` and others. Elsewhere a traceback is worth more.
        code = code.replace(co_filename=__file__)
    copy = FunctionType(code, _globals_of(function), function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def body_name(function: Function) -> str:
    """The name under which compiled code finds the body."""
    return f"{function.__module__}.{function.__qualname__}.{id(function)}".replace(".", "_").replace("<", "").replace(">", "")


def _choice(function: FunctionType) -> Function:
    """What chooses between two functions by a flag, with the bodies of these: they ask in its name, and would come back to it for ever.

    Written anew, for dynamo does not trace torch's own.
    """
    choice: dict[str, Any] = boolean_dispatched[function]
    name, place, default = choice["arg_name"], choice["index"], choice["default"]
    chosen, other = body(choice["if_true"]), body(choice["if_false"])

    def choose(*args: Any, **kwargs: Any) -> Any:
        flag = kwargs[name] if name in kwargs else args[place] if place < len(args) else default
        return chosen(*args, **kwargs) if flag else other(*args, **kwargs)

    return choose


def _globals_of(function: FunctionType) -> dict[str, Any]:
    scope = dict(function.__globals__)
    scope.update({name: one for name, one in _INSTEAD.items() if name in scope})
    # With a __name__ dynamo would guard on the real module's globals, which say something else.
    scope.pop("__name__", None)
    return scope


def _never(*_: object) -> bool:
    return False


class _Warnings:
    """Warns where somebody hears it: dynamo cannot trace a warning."""

    @staticmethod
    def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
        if not is_dynamo_compiling():
            warnings.warn(message, category, stacklevel=stacklevel + 1)


def _check_key_padding_mask(mask: Any, length: int, batch: int) -> None:
    """torch's own check without a message that refers to a tensor, which dynamo cannot trace."""
    if tuple(mask.shape[:2]) != (batch, length):
        raise AssertionError(f"Expected key_padding_mask of shape {(batch, length)}, but got {tuple(mask.shape)}")


_INSTEAD = dict.fromkeys(_QUESTIONS, _never) | {"warnings": _Warnings, "_check_key_padding_mask": _check_key_padding_mask}
"""What a body finds by these names."""


def _unwrapped(function: Function) -> FunctionType:
    # Tensor's Python methods ask in a wrapper around them.
    return cast("FunctionType", inspect.unwrap(function))


def _read(function: FunctionType, depth: int) -> set[str]:
    inner = _unwrapped(function)
    found: set[str] = set()
    for instruction in dis.get_instructions(inner):
        found |= _op_of(instruction)
    if depth:
        for callee in _callees(inner):
            found |= _read(callee, depth - 1)
    return {name for name in found if name in registry()}


def _callees(function: FunctionType) -> list[FunctionType]:
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    # boolean_dispatch keeps the two functions it chooses between in its closure.
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    return [
        callee for callee in (*named, *enclosed) if isinstance(callee, FunctionType) and callee is not function and has_body(callee) and _is_made_of_ops(callee)
    ]


def _is_made_of_ops(function: FunctionType) -> bool:
    module = function.__module__ or ""
    return module.startswith("torch") and not module.startswith(("torch.overrides", "torch._jit_internal", "torch._utils", "torch.nn.modules.utils"))


def _op_of(instruction: dis.Instruction) -> set[str]:
    if instruction.opname == "BINARY_OP":
        return {_OPERATORS.get(instruction.argrepr.removesuffix("="), "")}
    if instruction.opname in _UNARY:
        return {_UNARY[instruction.opname]}
    if instruction.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME") and isinstance(instruction.argval, str):
        return {canonical(instruction.argval)}
    return set()
