"""Read from the bytecode of torch's Python functions which ops they call.

Only for tests: opcodes change with every version of Python.
"""

from __future__ import annotations

import dis
import inspect
from types import FunctionType

from mezzo.autocasting.composites import is_python_function
from mezzo.policy.op_names import canonical
from mezzo.policy.registry import Function, registry

_OPERATORS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floor_divide",
    "%": "remainder",
    "**": "pow",
    "@": "matmul",
}
_UNARY = {"UNARY_NEGATIVE": "neg"}
_DEPTH = 3


def ops_inside(function: Function, depth: int = _DEPTH) -> set[str]:
    """Return the names of all ops that a Python function may call: rather too many than too few.

    Comparisons are left out: in torch's functions they compare sizes, and their results carry no
    precision.
    """
    inner = inspect.unwrap(function)
    if not is_python_function(function) or not isinstance(inner, FunctionType):
        return set()
    found: set[str] = set()
    for instruction in dis.get_instructions(inner):
        found |= _op_of(instruction)
    if depth:
        for callee in _callees(inner):
            found |= ops_inside(callee, depth - 1)
    return {name for name in found if name in registry()}


def _callees(function: FunctionType) -> list[FunctionType]:
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    # boolean_dispatch keeps the two functions it chooses between in its closure.
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    return [
        callee
        for callee in (*named, *enclosed)
        if isinstance(callee, FunctionType) and callee is not function and _is_made_of_ops(callee)
    ]


def _is_made_of_ops(function: FunctionType) -> bool:
    module = function.__module__ or ""
    return module.startswith("torch") and not module.startswith(
        ("torch.overrides", "torch._jit_internal", "torch._utils", "torch.nn.modules.utils")
    )


def _op_of(instruction: dis.Instruction) -> set[str]:
    if instruction.opname == "BINARY_OP":
        return {_OPERATORS.get(instruction.argrepr.removesuffix("="), "")}
    if instruction.opname in _UNARY:
        return {_UNARY[instruction.opname]}
    if instruction.opname in (
        "LOAD_GLOBAL",
        "LOAD_ATTR",
        "LOAD_METHOD",
        "LOAD_NAME",
    ) and isinstance(instruction.argval, str):
        return {canonical(instruction.argval)}
    return set()
