"""`mxnet.nd`: arrays, and MXNet's operators on arrays and tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet import _ops, _output_layers, autograd, random
from mezzo.compat.mxnet._context import Context, current_context
from mezzo.compat.mxnet._dtype import torch_dtype
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor, on_arrays
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["random"]

Shape = int | tuple[int, ...] | list[int]


def array(source_array: Any, ctx: Context | None = None, dtype: Any = None) -> NDArray:
    """Return a new array of a list, a NumPy array or a tensor; float32 by default, as in MXNet.

    >>> array([1, 2, 3]) * 2
    <BLANKLINE>
    [2. 4. 6.]
    <NDArray 3 @cpu(0)>
    """
    if dtype is None and isinstance(source_array, torch.Tensor):
        dtype = as_tensor(source_array).dtype
    if isinstance(source_array, list | tuple) and any(
        isinstance(item, NDArray) for item in source_array
    ):
        source_array = torch.stack([as_tensor(item) for item in source_array])
    tensor = torch.as_tensor(as_tensor(source_array)).detach()
    copied = tensor.to(dtype=torch_dtype(dtype), copy=True)
    return as_ndarray((ctx or current_context()).place(copied))


def zeros(shape: Shape, ctx: Context | None = None, dtype: Any = None, **_: Any) -> NDArray:
    """Return zeros.

    >>> zeros((2, 1)).shape
    torch.Size([2, 1])
    """
    return full(shape, 0.0, ctx, dtype)


def ones(shape: Shape, ctx: Context | None = None, dtype: Any = None, **_: Any) -> NDArray:
    """Return ones."""
    return full(shape, 1.0, ctx, dtype)


def full(shape: Shape, val: float, ctx: Context | None = None, dtype: Any = None) -> NDArray:
    """Return an array of one value."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    context = ctx or current_context()
    made = torch.full(sizes, val, dtype=torch_dtype(dtype), device=context.device)
    return as_ndarray(context.place(made))


empty = zeros


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    ctx: Context | None = None,
    dtype: Any = None,
) -> NDArray:
    """Return evenly spaced values, each repeated."""
    start, stop = (0, start) if stop is None else (start, stop)
    context = ctx or current_context()
    made = torch.arange(start, stop, step, dtype=torch_dtype(dtype), device=context.device)
    return as_ndarray(context.place(made.repeat_interleave(repeat)))


def eye(N: int, M: int = 0, ctx: Context | None = None, dtype: Any = None) -> NDArray:
    """Return an identity matrix."""
    context = ctx or current_context()
    return as_ndarray(torch.eye(N, M or N, dtype=torch_dtype(dtype), device=context.device))


def waitall() -> None:
    """Wait until all GPUs have computed everything."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


@on_arrays
def Dropout(data: torch.Tensor, p: float = 0.5, mode: str = "training") -> torch.Tensor:
    """Drop elements inside `autograd.record()`, or always with `mode="always"`."""
    return functional.dropout(data, p, mode == "always" or autograd.is_training())


@on_arrays
def LeakyReLU(data: torch.Tensor, act_type: str = "leaky", slope: float = 0.25) -> torch.Tensor:
    """Apply leaky, elu, selu or gelu."""
    functions = {
        "leaky": lambda: functional.leaky_relu(data, slope),
        "elu": lambda: functional.elu(data, slope),
        "selu": lambda: functional.selu(data),
        "gelu": lambda: functional.gelu(data),
    }
    if act_type not in functions:
        raise ValueError(f"Unknown act_type {act_type!r}. Choose one of: {', '.join(functions)}.")
    return functions[act_type]()


# -- operators whose meaning is torch's

sign = on_arrays(torch.sign)
ceil = on_arrays(torch.ceil)
floor = on_arrays(torch.floor)
trunc = on_arrays(torch.trunc)
exp = on_arrays(torch.exp)
log = on_arrays(torch.log)
log2 = on_arrays(torch.log2)
log10 = on_arrays(torch.log10)
log1p = on_arrays(torch.log1p)
expm1 = on_arrays(torch.expm1)
sqrt = on_arrays(torch.sqrt)
rsqrt = on_arrays(torch.rsqrt)
square = on_arrays(torch.square)
reciprocal = on_arrays(torch.reciprocal)
relu = on_arrays(torch.relu)
sigmoid = on_arrays(torch.sigmoid)
tanh = on_arrays(torch.tanh)
sin = on_arrays(torch.sin)
cos = on_arrays(torch.cos)
tan = on_arrays(torch.tan)
arcsin = on_arrays(torch.arcsin)
arccos = on_arrays(torch.arccos)
arctan = on_arrays(torch.arctan)
sinh = on_arrays(torch.sinh)
cosh = on_arrays(torch.cosh)
erf = on_arrays(torch.erf)
clip = on_arrays(torch.clip)
maximum = on_arrays(torch.maximum)
minimum = on_arrays(torch.minimum)
zeros_like = on_arrays(torch.zeros_like)
ones_like = on_arrays(torch.ones_like)
diag = on_arrays(torch.diag)
abs = on_arrays(torch.abs)
round = on_arrays(torch.round)
negative = on_arrays(torch.neg)
identity = on_arrays(torch.clone)
stop_gradient = BlockGrad = on_arrays(torch.detach)
softrelu = on_arrays(functional.softplus)
power = broadcast_power = on_arrays(torch.pow)
add = elemwise_add = broadcast_add = broadcast_plus = on_arrays(torch.add)
subtract = elemwise_sub = broadcast_sub = broadcast_minus = on_arrays(torch.sub)
multiply = elemwise_mul = broadcast_mul = on_arrays(torch.mul)
divide = elemwise_div = broadcast_div = on_arrays(torch.div)
broadcast_maximum, broadcast_minimum = maximum, minimum
add_n = on_arrays(lambda *arrays: torch.stack(arrays).sum(0))

cast = Cast = on_arrays(lambda data, dtype: data.to(dtype=torch_dtype(dtype)))

# -- operators of MXNet

mean = on_arrays(_ops.mean)
norm = on_arrays(_ops.norm)
argmax = on_arrays(_ops.argmax)
argmin = on_arrays(_ops.argmin)
argsort = on_arrays(_ops.argsort)
reshape = on_arrays(_ops.reshape)
flatten = on_arrays(_ops.flatten)
transpose = on_arrays(_ops.transpose)
swapaxes = on_arrays(_ops.swapaxes)
expand_dims = on_arrays(_ops.expand_dims)
squeeze = on_arrays(_ops.squeeze)
broadcast_to = on_arrays(_ops.broadcast_to)
tile = on_arrays(_ops.tile)
repeat = on_arrays(_ops.repeat)
concat = on_arrays(_ops.concat)
stack = on_arrays(_ops.stack)
split = on_arrays(_ops.split)
slice_axis = on_arrays(_ops.slice_axis)
take = on_arrays(_ops.take)
pick = on_arrays(_ops.pick)
one_hot = on_arrays(_ops.one_hot)
where = on_arrays(_ops.where)
dot = on_arrays(_ops.dot)
batch_dot = on_arrays(_ops.batch_dot)
softmax = on_arrays(_ops.softmax)
log_softmax = on_arrays(_ops.log_softmax)
smooth_l1 = on_arrays(_ops.smooth_l1)
Activation = on_arrays(_ops.Activation)
FullyConnected = on_arrays(_ops.FullyConnected)
Convolution = on_arrays(_ops.Convolution)
equal = on_arrays(_ops.equal)
not_equal = on_arrays(_ops.not_equal)
greater = on_arrays(_ops.greater)
greater_equal = on_arrays(_ops.greater_equal)
lesser = on_arrays(_ops.lesser)
lesser_equal = on_arrays(_ops.lesser_equal)
sum = on_arrays(_ops.sum)
max = on_arrays(_ops.max)
min = on_arrays(_ops.min)
Concat, Flatten, Reshape = concat, flatten, reshape

# -- output layers

SoftmaxOutput = on_arrays(_output_layers.SoftmaxOutput)
LinearRegressionOutput = on_arrays(_output_layers.LinearRegressionOutput)
LogisticRegressionOutput = on_arrays(_output_layers.LogisticRegressionOutput)
MAERegressionOutput = on_arrays(_output_layers.MAERegressionOutput)

__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch)
