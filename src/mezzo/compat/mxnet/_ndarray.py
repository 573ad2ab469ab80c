"""`NDArray`: torch's tensor with the attributes and methods of MXNet's array."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Self

import torch

from mezzo._casting import map_tensors
from mezzo._torch import is_torch_function_enabled
from mezzo.compat.mxnet import _ops, autograd
from mezzo.compat.mxnet._context import Context, context_of
from mezzo.compat.mxnet._dtype import numpy_dtype, torch_dtype

if TYPE_CHECKING:
    import numpy as np

_Tensor: Any = torch.Tensor
"""Without types: a type checker does not see that its attributes are descriptors."""


class NDArray(torch.Tensor):
    """`mxnet.nd.NDArray`: a tensor with NumPy dtypes, contexts and MXNet's method names.

    Torch functions accept it and return arrays. Code of torch that runs inside such a call sees an
    ordinary tensor: `dtype`, `size` and the methods are MXNet's only for code that uses the array
    directly.

    >>> array = as_ndarray(torch.ones(2, 3))
    >>> array.size, array.shape, (array * 2).asnumpy().sum().item()
    (6, torch.Size([2, 3]), 12.0)
    """

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        """The scalar type of NumPy, as in MXNet; `torch.bfloat16` where NumPy has none."""
        dtype = _Tensor.dtype.__get__(self)
        return numpy_dtype(dtype) if is_torch_function_enabled() else dtype

    @property
    def size(self) -> Any:
        """The number of elements. As in torch, `array.size(0)` is the size of a dimension."""
        if not is_torch_function_enabled():
            return super().size
        return _Size(self.numel(), super().size)

    @property
    def context(self) -> Context:
        """The context that holds the array."""
        return context_of(self)

    ctx = context

    @property
    def stype(self) -> str:
        """The storage type; always "default"."""
        return "default"

    @property
    def grad(self) -> Any:
        """The gradient, an array; None before `attach_grad`."""
        gradient = _Tensor.grad.__get__(self)
        return None if gradient is None else as_ndarray(gradient)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _Tensor.grad.__set__(self, as_tensor(value))

    @grad.deleter
    def grad(self) -> None:
        _Tensor.grad.__delete__(self)

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array on the CPU; bfloat16 becomes float32. This synchronizes."""
        tensor = as_tensor(self).detach().cpu()
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        array: np.ndarray[Any, Any] = tensor.numpy().copy()
        return array

    def asscalar(self) -> Any:
        """Return the only element as a number. This synchronizes."""
        if self.numel() != 1:
            raise ValueError(
                f"The current array is not a scalar: its shape is {tuple(self.shape)}. Reduce it"
                " first, for example with mean()."
            )
        return self.item()

    def wait_to_read(self) -> None:
        """Wait until the device has computed the array."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def as_in_context(self, ctx: Context) -> NDArray:
        """Return the array in a context; itself if it is there already."""
        tensor = as_tensor(self)
        placed = ctx.place(tensor)
        return self if placed is tensor else as_ndarray(placed)

    as_in_ctx = as_in_context

    def copyto(self, other: NDArray | Context) -> NDArray:
        """Copy into an array, which is returned, or into a new array in a context."""
        if isinstance(other, Context):
            return as_ndarray(other.place(as_tensor(self).clone()))
        as_tensor(other).detach().copy_(as_tensor(self))
        return other

    def copy(self) -> NDArray:
        """Return a copy in the same context."""
        return as_ndarray(as_tensor(self).clone())

    def astype(self, dtype: Any, copy: bool = True) -> NDArray:
        """Return the array in another dtype; with `copy=False` itself if it has it already."""
        return as_ndarray(as_tensor(self).to(dtype=torch_dtype(dtype), copy=copy))

    def attach_grad(self, grad_req: str = "write", stype: str | None = None) -> None:
        """Compute gradients for this array: `write` replaces `grad` at each backward, `add` sums.

        Differs from MXNet: an array that was computed stays in the graph of its inputs.
        """
        if grad_req not in ("write", "add", "null"):
            raise ValueError(f"Unknown grad_req {grad_req!r}. Choose one of: write, add, null.")
        if not self.is_leaf:
            self.retain_grad()
            return
        self.requires_grad_(grad_req != "null")
        self.grad_req = grad_req
        """Read by `autograd.backward`."""
        if grad_req != "null":
            self.grad = torch.zeros_like(as_tensor(self))

    def backward(  # type: ignore[override]
        self,
        out_grad: torch.Tensor | None = None,
        retain_graph: bool = False,
        train_mode: bool = True,
    ) -> None:
        """Compute the gradients of this array; `out_grad` defaults to ones, for any shape."""
        autograd.backward(as_tensor(self), as_tensor(out_grad), retain_graph, train_mode)

    def detach(self) -> NDArray:
        """Return the array without its graph, sharing memory."""
        return as_ndarray(as_tensor(self).detach())

    def __repr__(self) -> str:  # type: ignore[override]
        shape = "x".join(map(str, self.shape))
        return f"\n{self.asnumpy()}\n<NDArray {shape} @{self.context}>"

    def __float__(self) -> float:
        return float(self.asscalar())

    def __int__(self) -> int:
        return int(self.asscalar())

    def __format__(self, format_spec: str) -> str:
        return format(self.asscalar(), format_spec) if format_spec else str(self)

    def __reduce_ex__(self, _: Any) -> Any:
        return _rebuild, (as_tensor(self).detach(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> NDArray:
        copied = _rebuild(as_tensor(self).detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __hash__(self) -> int:
        return id(self)


class _Size(int):
    """A number of elements that can be called like torch's `size`."""

    _method: Callable[..., Any]

    def __new__(cls, count: int, method: Callable[..., Any]) -> Self:
        size = super().__new__(cls, count)
        size._method = method
        return size

    def __call__(self, *args: Any) -> Any:
        return self._method(*args)


def as_ndarray(tensor: torch.Tensor) -> NDArray:
    """Return a tensor as an array: the same memory, and the same graph for autograd."""
    if isinstance(tensor, NDArray):
        return tensor
    array: NDArray = tensor.as_subclass(NDArray)
    return array


def as_tensor(value: Any) -> Any:
    """Return an array as an ordinary tensor without a copy; anything else as it is."""
    return value.as_subclass(_Tensor) if isinstance(value, NDArray) else value


def on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors that takes arrays too, and then returns arrays.

    >>> type(on_arrays(torch.relu)(as_ndarray(torch.ones(1)))).__name__
    'NDArray'
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        plain_args, plain_kwargs = map_tensors((args, kwargs), as_tensor)
        result = function(*plain_args, **plain_kwargs)
        if plain_args is args and plain_kwargs is kwargs:
            return result
        return map_tensors(result, as_ndarray)

    return run


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator as a method, which for code of torch is torch's own."""
    torch_method = getattr(_Tensor, name, None)
    on_array = on_arrays(function)

    @wraps(function)
    def method(self: NDArray, *args: Any, **kwargs: Any) -> Any:
        if torch_method is not None and not is_torch_function_enabled():
            return torch_method(self, *args, **kwargs)
        return on_array(self, *args, **kwargs)

    return method


for _name in _ops.METHODS:
    setattr(NDArray, _name, _method(_name, getattr(_ops, _name)))
for _name, _function in _ops.COMPARISONS.items():
    setattr(NDArray, _name, _method(_name, _function))


def _rebuild(tensor: torch.Tensor, requires_grad: bool) -> NDArray:
    """Return an array that is a leaf; for pickle and copy."""
    array = as_ndarray(tensor)
    array.requires_grad_(requires_grad)
    return array
