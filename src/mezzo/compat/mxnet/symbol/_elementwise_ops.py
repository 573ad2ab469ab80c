"""MXNet's elementwise ops and casts in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._casting import cast
from mezzo.compat.mxnet import _ops as operators
from mezzo.compat.mxnet.symbol._ops import register

# -- elementwise -----------------------------------------------------------------------------------

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "abs ceil floor trunc sign sqrt rsqrt square exp expm1 log log2 log10 log1p sin cos"
        " tan tanh sinh cosh sigmoid relu negative reciprocal erf zeros_like ones_like"
    ).split()
} | {
    # Of two nearest integers MXNet's round takes the one away from 0, and its rint the smaller.
    "round": lambda x: x.sign() * (x.abs() + 0.5).floor(),
    "rint": lambda x: (x - 0.5).ceil(),
    "fix": torch.trunc,
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "arctan": torch.atan,
    "arcsin": torch.asin,
    "arccos": torch.acos,
    "arcsinh": torch.asinh,
    "arccosh": torch.acosh,
    "arctanh": torch.atanh,
    "softsign": F.softsign,
    "gammaln": torch.lgamma,
    "logical_not": lambda x: x.logical_not().to(x.dtype),
    "_copy identity _np_copy": lambda x: x,
    "BlockGrad stop_gradient": lambda x: x.detach(),
    "shape_array": lambda x: torch.tensor(x.shape),
}

_BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "mod": torch.remainder,
    "power": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "hypot": torch.hypot,
}

_COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "lesser": torch.lt,
    "lesser_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}

_BINARY_ALIASES = {
    "add": "elemwise_add _plus _Plus _add _grad_add",
    "sub": "elemwise_sub _minus _Minus _sub",
    "mul": "elemwise_mul _mul _Mul",
    "div": "elemwise_div _div _Div",
    "mod": "_mod _Mod",
    "power": "_power _Power",
    "maximum": "_maximum _Maximum",
    "minimum": "_minimum _Minimum",
    "hypot": "_hypot",
}
_BROADCAST_ALIASES = {"add": " broadcast_plus", "sub": " broadcast_minus"}
_SCALAR_NAMES = {"add": "plus", "sub": "minus"}


def _add_unary(names: str, function: Callable[[Tensor], Tensor]) -> None:
    @register(names)
    def run(data: Tensor) -> Tensor:
        return function(data)


def _add_binary(names: str, function: Callable[..., Tensor]) -> None:
    @register(names)
    def run(lhs: Tensor, rhs: Tensor) -> Tensor:
        return function(lhs, rhs)


def _add_scalar(names: str, function: Callable[..., Tensor], *, swapped: bool = False) -> None:
    @register(names, ignored="is_int")
    def run(data: Tensor, *, scalar: float) -> Tensor:
        # In the dtype of the data, as in MXNet. On the CPU: a copy to the device would synchronize.
        number = torch.tensor(scalar, dtype=data.dtype)
        return function(number, data) if swapped else function(data, number)


def _as_numbers(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # MXNet's comparisons have the dtype of the first input.
    return lambda lhs, rhs: function(lhs, rhs).to(lhs.dtype)


def _scalar_names(name: str) -> str:
    """Return MXNet's names of an op with a number: `_plus_scalar`, in old files `_PlusScalar`."""
    spelled = _SCALAR_NAMES.get(name, name)
    camel = "".join(part.capitalize() for part in spelled.split("_"))
    return f"_{spelled}_scalar _{camel}Scalar"


for _names, _function in _UNARY.items():
    _add_unary(_names, _function)
for _name, _function in _BINARY.items():
    _add_binary(_BINARY_ALIASES[_name], _function)
    _add_binary(f"broadcast_{_name}{_BROADCAST_ALIASES.get(_name, '')}", _function)
    _add_scalar(_scalar_names(_name), _function)
for _name, _function in _COMPARISONS.items():
    _add_binary(f"broadcast_{_name}", _as_numbers(_function))
    _add_binary(f"_{_name}", _as_numbers(_function))
    _add_scalar(_scalar_names(_name), _as_numbers(_function))
for _name in ("sub", "div", "mod", "power"):
    _spelled = _SCALAR_NAMES.get(_name, _name)
    _add_scalar(
        f"_r{_spelled}_scalar _R{_spelled.capitalize()}Scalar", _BINARY[_name], swapped=True
    )


@register("add_n ElementWiseSum _sparse_add_n")
def _add_n(*args: Tensor) -> Tensor:
    result = args[0]
    for arg in args[1:]:
        result = result + arg
    return result


@register("clip")
def _clip(data: Tensor, *, a_min: float, a_max: float) -> Tensor:
    return data.clamp(a_min, a_max)


@register("smooth_l1")
def _smooth_l1(data: Tensor, *, scalar: float = 1.0) -> Tensor:
    return operators.smooth_l1(data, scalar)


@register("hard_sigmoid")
def _hard_sigmoid(data: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * data + beta).clamp(0, 1)


@register("where")
def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return operators.where(condition, x, y)


# -- casts -----------------------------------------------------------------------------------------


@register("Cast cast")
def _cast(data: Tensor, *, dtype: torch.dtype) -> Tensor:
    return cast(data, dtype)


def _cast_floating(data: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(data, dtype) if data.is_floating_point() else data


@register("amp_cast")
def _amp_cast(data: Tensor, *, dtype: torch.dtype) -> Tensor:
    return _cast_floating(data, dtype)


@register("amp_multicast", outputs=lambda attributes: int(attributes["num_outputs"]))
def _amp_multicast(*data: Tensor, num_outputs: int, cast_narrow: bool = False) -> list[Tensor]:
    dtypes = [tensor.dtype for tensor in data[:num_outputs] if tensor.is_floating_point()]
    if not dtypes:
        return list(data)
    choose = min if cast_narrow else max
    dtype = choose(dtypes, key=lambda tensor: tensor.itemsize)
    return [_cast_floating(tensor, dtype) for tensor in data]
