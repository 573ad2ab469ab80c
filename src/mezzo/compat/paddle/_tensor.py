"""`paddle.Tensor`: a torch tensor with Paddle's methods, and `to_tensor`.

What torch functions return for such tensors is such a tensor too. Nothing of torch is changed.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import has_torch_function

from mezzo._casting import map_tensors
from mezzo._torch import DisableTorchFunctionSubclass
from mezzo.compat.paddle._dtypes import DTYPES, parse_dtype
from mezzo.compat.paddle._places import Place, default_device, device_of, place_of

_torch_grad: Any = torch.Tensor.grad


class Shape(tuple[int, ...]):
    """A shape: a tuple that also equals a list, because Paddle's shapes are lists.

    >>> Shape((2, 3)) == [2, 3], Shape((2, 3)) + [1]
    (True, [2, 3, 1])
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __add__(self, other: Any) -> Any:
        return [*self, *other] if isinstance(other, list) else Shape(super().__add__(other))

    def __repr__(self) -> str:
        return repr(list(self))

    def numel(self) -> int:
        """Return the number of elements, as `torch.Size` does."""
        return prod(self)


class Tensor(torch.Tensor):
    """`paddle.Tensor`: a torch tensor with Paddle's methods.

    Methods that both systems have take the arguments of either: `transpose([1, 0])` and
    `transpose(0, 1)`. A saved tensor is a plain one, which any torch program can load.

    >>> x = to_tensor([[1.0, 2.0]], place="cpu", stop_gradient=False)
    >>> loss = (x * x).sum()
    >>> loss.backward()
    >>> loss.numpy(), x.grad.numpy()
    (array(5., dtype=float32), array([[2., 4.]], dtype=float32))
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and not all(issubclass(cls, other) for other in types):
            return NotImplemented
        if torch.compiler.is_compiling():
            return super().__torch_function__(func, types, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs) if kwargs else func(*args)
        kind = type(result)
        if kind is torch.Tensor:
            return _claim(result, args, kwargs)
        if isinstance(result, list | tuple) and kind is not torch.Size:
            return map_tensors(result, lambda tensor: _claim(tensor, args, kwargs))
        return result

    # -- attributes --------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The sizes, which equal a list."""
        with DisableTorchFunctionSubclass():
            # Not the getter that this overrides: dynamo would find this one again.
            return Shape(self.size())

    @property
    def place(self) -> Place:
        """The place of its values."""
        return place_of(self.device)

    @property
    def stop_gradient(self) -> bool:
        """Whether no gradient is computed for it; torch's `requires_grad`, negated."""
        return not self.requires_grad

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        if value and not self.is_leaf:
            self.detach_()
        elif self.is_floating_point() or self.is_complex():
            self.requires_grad_(not value)

    @property
    def persistable(self) -> bool:
        """Whether it is a parameter."""
        return isinstance(self, nn.Parameter)

    def backward(
        self,
        grad_tensor: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Compute gradients, with Paddle's arguments and then torch's."""
        if not self.requires_grad:
            raise RuntimeError(
                "backward() of a tensor with stop_gradient=True: it depends on no parameter that is"
                " trained. Compute the loss from a layer's output, outside paddle.no_grad(), or set"
                " stop_gradient = False on what should get a gradient."
            )
        super().backward(grad_tensor, retain_graph, create_graph, inputs)

    # -- values ------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = True) -> Any:
        """Return an array, also if a gradient is needed or the values are on a GPU. Synchronizes.

        bfloat16 comes as uint16, as in Paddle.
        """
        with DisableTorchFunctionSubclass():
            plain = self.detach().cpu()
            if plain.dtype is torch.bfloat16:
                return plain.view(torch.int16).numpy().view("uint16")
            return torch.Tensor.numpy(plain)

    def gradient(self) -> Any:
        """Return the gradient as an array, or None."""
        return None if self.grad is None else as_tensor(self.grad).numpy()

    def set_value(self, value: Any) -> None:
        """Copy values of the same shape into it: a tensor, an array or a number."""
        with torch.no_grad():
            source = torch.as_tensor(value, dtype=self.dtype, device=self.device)
            if tuple(source.shape) != tuple(self.shape):
                raise ValueError(
                    f"The shape of value is {list(source.shape)}, but the shape of the tensor is"
                    f" {self.shape}. They must be equal."
                )
            self.copy_(source)

    def astype(self, dtype: Any) -> Tensor:
        """Cast to a dtype, given as itself or by name."""
        return torch.Tensor.to(self, dtype=parse_dtype(dtype))  # type: ignore[return-value]

    cast = astype

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return it on a device, in a dtype or both; also by Paddle's names and places."""
        args, kwargs = parse_to(args, kwargs)
        return torch.Tensor.to(self, *args, **kwargs)

    def _to(self, device: Any = None, dtype: Any = None, blocking: bool | None = None) -> Self:
        """Move it in place, as Paddle does, and return it."""
        target = self.device if device is None else device_of(device)
        wanted = self.dtype if dtype is None else parse_dtype(dtype)
        if target != self.device or wanted is not self.dtype:
            self.data = torch.Tensor.to(self.detach(), target, wanted)
        return self

    def cuda(self, device_id: Any = None, blocking: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return it on a GPU."""
        name = "gpu" if device_id is None else device_id
        device = device_of(f"gpu:{name}" if isinstance(name, int) else name)
        return torch.Tensor.to(self, device, non_blocking=not blocking, **kwargs)

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        """Zero the gradient, or drop it."""
        if self.grad is not None:
            if set_to_zero:
                self.grad.detach_().zero_()
            else:
                self.grad = None

    clear_grad = clear_gradient

    # -- methods whose arguments differ ------------------------------------------------------------

    def transpose(self, *axes: Any, perm: Any = None, **kwargs: Any) -> Any:
        """Permute all axes by a list, or swap two as torch does."""
        order = axes[0] if axes and isinstance(axes[0], list | tuple) else perm
        if order is None:
            return torch.Tensor.transpose(self, *axes, **kwargs)
        return self.permute(*order)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Return it in another shape; -1 is computed, and 0 copies the size of that axis."""
        sizes = kwargs.get("shape", shape[0] if len(shape) == 1 else shape)
        sizes = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
        return torch.Tensor.reshape(self, copy_zero_sizes(self, sizes))

    def flatten(self, start_axis: int = 0, stop_axis: int = -1, **kwargs: Any) -> Any:  # type: ignore[override]
        """Flatten a range of axes; the arguments may have torch's names."""
        start, stop = kwargs.get("start_dim", start_axis), kwargs.get("end_dim", stop_axis)
        return torch.Tensor.flatten(self, start, stop)

    def split(self, num_or_sections: Any = None, axis: int = 0, **kwargs: Any) -> Any:  # type: ignore[override]
        """Split into a number of equal parts, or into parts of given sizes.

        An int is the number of parts, as in Paddle; torch's `split_size=` is the size of a part.
        """
        if num_or_sections is None or not has_torch_function((self,)):
            # Called by a function of torch, which means the size of a part.
            sizes = () if num_or_sections is None else (num_or_sections, axis)
            return torch.Tensor.split(self, *sizes, **kwargs)
        return split(self, num_or_sections, kwargs.get("dim", axis))

    def unsqueeze(self, axis: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Insert axes of size one: one, or a list of them."""
        axis, result = kwargs.get("dim", axis), self
        for each in axis if isinstance(axis, list | tuple) else [axis]:
            result = torch.Tensor.unsqueeze(result, each)  # type: ignore[assignment]
        return result

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Return slices along an axis by number as in Paddle, or torch's `gather(dim, index)`."""
        if args and isinstance(args[0], torch.Tensor):
            return self.index_select(args[0].reshape(-1), *args[1:], **kwargs)
        return torch.Tensor.gather(self, *args, **kwargs)

    def index_select(self, *args: Any, **kwargs: Any) -> Any:
        """Return slices by number: `(index, axis)` as in Paddle, or torch's `(dim, index)`."""
        if args and isinstance(args[0], torch.Tensor):
            axis = args[1] if len(args) > 1 else kwargs.get("axis")
            return torch.Tensor.index_select(self, int(axis or 0), args[0])
        return torch.Tensor.index_select(self, *args, **kwargs)

    def matmul(self, y: torch.Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Any:
        """Return the matrix product, with the last two axes of either swapped before."""
        x: torch.Tensor = torch.Tensor.transpose(self, -1, -2) if transpose_x else self
        return torch.Tensor.matmul(x, y.mT if transpose_y else y)

    def greater_than(self, y: Any) -> Any:
        """Return which values are greater."""
        return self > y

    def scale(self, scale: float = 1.0, bias: float = 0.0) -> Any:
        """Return the values times a number, plus another."""
        return self * scale + bias if bias else self * scale

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """Return the largest values along an axis, alone as in Paddle; `dim=` is torch's."""
        return _reduce("max", self, args, kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        """Return the smallest values along an axis, alone as in Paddle; `dim=` is torch's."""
        return _reduce("min", self, args, kwargs)

    # -- copies and files --------------------------------------------------------------------------

    def __copy__(self) -> Tensor:
        copied = as_tensor(plain_tensor(self).detach())
        copied.requires_grad_(self.requires_grad)
        return copied

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = as_tensor(plain_tensor(self).detach().clone())
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_tensor(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return _format(self)

    # torch warns when a tensor that needs a gradient becomes a number; Paddle's programs do that.

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.numel() == 1 else repr(self), spec)


class Gradient(Tensor):
    """A parameter's gradient: Paddle's methods, and the speed of a plain tensor in an optimizer."""

    # torch's own for parameters: results are plain tensors, and reading a dtype takes 0.1 µs and
    # not 2.
    __torch_function__ = nn.Parameter.__torch_function__


class Parameter(nn.Parameter, Tensor):
    """A parameter of a layer: torch's, with Paddle's methods.

    What functions return for parameters alone is a plain tensor. With a `Tensor` among the
    arguments, as in every layer, it is a `Tensor`.

    >>> weight = Parameter(torch.ones(2, 3))
    >>> weight.shape, weight.stop_gradient, weight.trainable
    ([2, 3], False, True)
    """

    name: Any = None
    """Its name, such as `linear_0.w_0`; None if no layer of Paddle made it."""
    optimize_attr: Any = {"learning_rate": 1.0}  # noqa: RUF012 - replaced, not changed
    """Multiple of the optimizer's learning rate: `ParamAttr(learning_rate=)`."""
    regularizer: Any = None
    """Its own weight decay: `ParamAttr(regularizer=)`."""

    @property
    def grad(self) -> Any:
        """The gradient, or None."""
        gradient = _torch_grad.__get__(self)
        if type(gradient) is torch.Tensor:
            gradient.__class__ = Gradient
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _torch_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _torch_grad.__delete__(self)

    @property
    def trainable(self) -> bool:
        """Whether it is trained; torch's `requires_grad`."""
        return self.requires_grad

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.requires_grad_(value)

    def __deepcopy__(self, memo: Any) -> Any:
        copied = nn.Parameter.__deepcopy__(self, memo)
        copied.__dict__.update(self.__dict__)
        if self.name is not None:
            copied.__dict__["name"] = f"{self.name}_deepcopy_{next(_copies)}"
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_parameter, (self.data, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{_format(self)}"


_copies = itertools.count()


def _rebuild_parameter(data: torch.Tensor, requires_grad: bool) -> Parameter:
    return Parameter(data, requires_grad)


# -- conversion ------------------------------------------------------------------------------------


def to_tensor(
    data: Any, dtype: Any = None, place: Any = None, stop_gradient: bool = True
) -> Tensor:
    """Return a tensor with a copy of data: numbers, lists, arrays or another tensor.

    Without a place it is on the default one. Python numbers become float32 or int64.

    >>> to_tensor([1, 2], dtype="float32", place="cpu")
    Tensor(shape=[2], dtype=float32, place=Place(cpu), stop_gradient=True,
           [1., 2.])
    """
    device = default_device() if place is None else device_of(place)
    wanted = None if dtype is None else parse_dtype(dtype)
    if isinstance(data, torch.Tensor):
        tensor = plain_tensor(data.detach()).to(device, wanted, copy=True)
    else:
        tensor = torch.tensor(_stack_arrays(data), dtype=wanted, device=device)
    result = as_tensor(tensor)
    result.stop_gradient = stop_gradient
    return result


def as_tensor(tensor: torch.Tensor) -> Tensor:
    """Return a torch tensor as a `Tensor`; it shares values and gradients."""
    return tensor if isinstance(tensor, Tensor) else tensor.as_subclass(Tensor)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a `Tensor` as torch's own type; it shares values and gradients."""
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, Tensor) else tensor


def split(x: torch.Tensor, num_or_sections: Any, axis: int = 0) -> Any:
    """Split into a number of equal parts, or into parts of given sizes, one of which may be -1."""
    size = x.shape[axis]
    if isinstance(num_or_sections, int):
        if size % num_or_sections:
            raise ValueError(
                f"The size {size} of axis {axis} cannot be split into {num_or_sections} equal"
                " parts. Pass a list of sizes."
            )
        sections = [size // num_or_sections] * num_or_sections
    else:
        sections = [int(section) for section in num_or_sections]
        if -1 in sections:
            sections[sections.index(-1)] = size - sum(sections) - 1
    return list(torch.Tensor.split(x, sections, axis))


def copy_zero_sizes(x: torch.Tensor, shape: list[Any]) -> list[Any]:
    """Return a shape with each 0 replaced by the size of that axis, as Paddle's `reshape` does."""
    if 0 not in shape or x.numel() == 0:
        return shape
    return [x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]


def _claim(result: Any, args: Any, kwargs: Any) -> Any:
    """Make a result a `Tensor`, unless it is an argument of the call.

    Its class is set in place: `as_subclass` would add a view and a node of the autograd graph to
    every op, 4 of its 10 µs.
    """
    if type(result) is not torch.Tensor or (kwargs and result is kwargs.get("out")):
        return result
    for argument in args:
        if argument is result:
            return result
    result.__class__ = Tensor
    return result


def _reduce(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `max` or `min` of torch, or `amax` or `amin` for an axis in Paddle's way."""
    is_paddle = has_torch_function((x,)) and "dim" not in kwargs
    axis = kwargs.get("axis", args[0] if args else None)
    if not is_paddle or axis is None or isinstance(axis, torch.Tensor):
        kwargs.pop("axis", None)
        return getattr(torch.Tensor, name)(x, *(() if axis is None else args), **kwargs)
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    return getattr(torch, f"a{name}")(x, axis, keepdim)


def parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of `to` as torch takes them: names, places and `blocking` translated."""
    if kwargs.keys() & {"device", "blocking"} or isinstance(kwargs.get("dtype"), str):
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if "blocking" in kwargs:
            kwargs["non_blocking"] = not kwargs.pop("blocking")
        if "device" in kwargs:
            kwargs["device"] = device_of(kwargs["device"])
        if "dtype" in kwargs:
            kwargs["dtype"] = parse_dtype(kwargs["dtype"])
    if any(isinstance(value, str | Place) for value in args):
        return tuple(map(_parse_target, args)), kwargs
    return args, kwargs


def _parse_target(value: Any) -> Any:
    """Return the dtype or the device that an argument of `to` names; anything else as it is."""
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    return device_of(value) if isinstance(value, str | Place) else value


def _stack_arrays(data: Any) -> Any:
    """Join a list of arrays to one array: torch would read them element by element."""
    if isinstance(data, list | tuple) and data and hasattr(data[0], "__array__"):
        import numpy as np  # noqa: PLC0415 - mezzo works without NumPy

        return np.stack([np.asarray(item) for item in data])
    return data


def _format(tensor: torch.Tensor) -> str:
    """Return a tensor's values and attributes as Paddle prints them."""
    import numpy as np  # noqa: PLC0415 - mezzo works without NumPy

    head = (
        f"Tensor(shape={list(tensor.shape)}, dtype={str(tensor.dtype).removeprefix('torch.')},"
        f" place={place_of(tensor.device)!r}, stop_gradient={not tensor.requires_grad}"
    )
    if tensor.is_meta:
        return f"{head})"
    plain = plain_tensor(tensor.detach()).cpu()
    values = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()
    return f"{head},\n       {np.array2string(values, separator=', ', prefix=' ' * 7)})"
