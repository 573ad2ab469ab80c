"""Elementwise functions of `megengine.functional`: torch's, which also accept numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mezzo.compat.megengine._tensor import Tensor

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "clip",
    "cos",
    "cosh",
    "div",
    "equal",
    "erf",
    "exp",
    "expm1",
    "floor",
    "floor_div",
    "greater",
    "greater_equal",
    "isinf",
    "isnan",
    "left_shift",
    "less",
    "less_equal",
    "log",
    "log1p",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "neg",
    "not_equal",
    "pow",
    "right_shift",
    "round",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
]

Function = Callable[..., torch.Tensor]


def _on_numbers(function: Function) -> Function:
    """Let a function of torch accept numbers for tensors, as MegEngine's do."""

    def call(*values: Any) -> torch.Tensor:
        devices = [value.device for value in values if isinstance(value, torch.Tensor)]
        device = devices[0] if devices else None
        return function(
            *(
                value if isinstance(value, torch.Tensor) else Tensor(value, device=device)
                for value in values
            )
        )

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = f"`torch.{function.__name__}` of tensors or numbers."
    return call


abs = _on_numbers(torch.abs)
acos = _on_numbers(torch.acos)
acosh = _on_numbers(torch.acosh)
add = _on_numbers(torch.add)
asin = _on_numbers(torch.asin)
asinh = _on_numbers(torch.asinh)
atan = _on_numbers(torch.atan)
atan2 = _on_numbers(torch.atan2)
atanh = _on_numbers(torch.atanh)
ceil = _on_numbers(torch.ceil)
cos = _on_numbers(torch.cos)
cosh = _on_numbers(torch.cosh)
div = _on_numbers(torch.div)
equal = _on_numbers(torch.eq)
erf = _on_numbers(torch.erf)
exp = _on_numbers(torch.exp)
expm1 = _on_numbers(torch.expm1)
floor = _on_numbers(torch.floor)
floor_div = _on_numbers(torch.floor_divide)
greater = _on_numbers(torch.gt)
greater_equal = _on_numbers(torch.ge)
isinf = _on_numbers(torch.isinf)
isnan = _on_numbers(torch.isnan)
left_shift = _on_numbers(torch.bitwise_left_shift)
less = _on_numbers(torch.lt)
less_equal = _on_numbers(torch.le)
log = _on_numbers(torch.log)
log1p = _on_numbers(torch.log1p)
logaddexp = _on_numbers(torch.logaddexp)
logical_and = _on_numbers(torch.logical_and)
logical_not = _on_numbers(torch.logical_not)
logical_or = _on_numbers(torch.logical_or)
logical_xor = _on_numbers(torch.logical_xor)
maximum = _on_numbers(torch.maximum)
minimum = _on_numbers(torch.minimum)
mod = _on_numbers(torch.remainder)
mul = _on_numbers(torch.mul)
neg = _on_numbers(torch.neg)
not_equal = _on_numbers(torch.ne)
pow = _on_numbers(torch.pow)
right_shift = _on_numbers(torch.bitwise_right_shift)
round = _on_numbers(torch.round)
sign = _on_numbers(torch.sign)
sin = _on_numbers(torch.sin)
sinh = _on_numbers(torch.sinh)
sqrt = _on_numbers(torch.sqrt)
square = _on_numbers(torch.square)
sub = _on_numbers(torch.sub)
tan = _on_numbers(torch.tan)
tanh = _on_numbers(torch.tanh)


def clip(x: torch.Tensor, lower: Any = None, upper: Any = None) -> torch.Tensor:
    """Limit the elements to `[lower, upper]`; None is no limit.

    >>> clip(torch.tensor([-2.0, 2.0]), upper=1.0)
    tensor([-2.,  1.])
    """
    if lower is None and upper is None:
        raise AssertionError("F.clip needs lower, upper or both.")
    return torch.clamp(x, lower, upper)
