"""Inputs of a step: call shapes, signature, static buffers, values that a function closes over."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from mezzo._casting import (
    PLAIN_TYPES,
    SEQUENCES,
    field_items,
    is_dataclass_instance,
    map_tensors,
)
from mezzo._errors import PolicyError

IMAGE_DIMS = 4
"""Dimensions of a batch of images, which can have the channels_last memory format."""


class Call(NamedTuple):
    """The arguments of one call of a step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ModelArguments:
    """Arranges the arguments of a call for a model.

    >>> arguments = ModelArguments(nn.Bilinear(2, 2, 1))
    >>> arguments.arrange(({"input1": 1, "input2": 2},), {})
    {'input1': 1, 'input2': 2}
    >>> arguments.arrange((1,), {"input2": 2})
    Call(args=(1,), kwargs={'input2': 2})
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            has_model = isinstance(getattr(model, "model", None), nn.Module)
            shown = type(model).__name__
            raise PolicyError(
                f"model={shown} is not a torch.nn.Module. Pass the model itself"
                + (f": the attribute model of this {shown}." if has_model else ".")
            )
        self._model = model
        self._unpacks: dict[Hashable, bool] = {}
        """Whether a container is unpacked, by its type and its names or its length."""
        self._parameters: tuple[str, ...] = ()
        """Names of the parameters of the model's forward."""
        # Some forwards have no signature.
        with suppress(TypeError, ValueError):
            self._parameters = tuple(inspect.signature(model.forward).parameters)

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments as one value for `call_model`.

        A mapping or a dataclass that is the only argument becomes keywords, a tuple positional
        arguments, unless the model can only take it whole. A named tuple becomes keywords if its
        names are those of parameters of the model, whose order need not be its own.
        """
        if len(args) == 1:
            (argument,) = args
            if isinstance(argument, torch.Tensor):
                return Call(args, kwargs) if kwargs else argument
            keywords = as_keywords(argument)
            if keywords is None:
                keywords = self._named_fields(argument)
            if keywords is not None:
                return self._arrange_keywords(argument, keywords, kwargs)
            if isinstance(argument, tuple) and self._is_unpacked(argument, Call(argument, kwargs)):
                args = tuple(argument)
        if kwargs:
            return Call(args, kwargs) if args else kwargs
        return args

    def _named_fields(self, value: Any) -> dict[str, Any] | None:
        """Return the fields of a named tuple, if the model has parameters of all their names."""
        names = getattr(value, "_fields", None)
        if not names or not isinstance(value, tuple):
            return None
        return dict(zip(names, value, strict=True)) if {*names} <= {*self._parameters} else None

    def _arrange_keywords(
        self, batch: Any, keywords: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        if not self._is_unpacked(batch, Call((), keywords)):
            self._refuse_surplus(batch, keywords)
            return Call((batch,), kwargs) if kwargs else (batch,)
        if kwargs:
            raise PolicyError(
                f"Got a {type(batch).__name__} with {_listed(keywords)} and the keywords"
                f" {_listed(kwargs)}. Pass one of them: step(batch) or step(**batch)."
            )
        return keywords

    def _refuse_surplus(self, batch: Any, keywords: dict[str, Any]) -> None:
        """Raise if a batch has the model's first parameter, but also names that the model lacks."""
        if next(iter(self._parameters), None) not in keywords:
            return
        surplus = [name for name in keywords if name not in self._parameters]
        if surplus:
            raise PolicyError(
                f"Got a {type(batch).__name__} with {_listed(keywords)}, and"
                f" {type(self._model).__name__}.forward() has no parameter"
                f" {' or '.join(map(repr, surplus))}. Leave it out of the batch; or pass the batch"
                " in a tuple, step((batch,)), if the model takes it whole."
            )

    def _is_unpacked(self, batch: Any, unpacked: Call) -> bool:
        key = (type(batch), len(unpacked.args), *unpacked.kwargs)
        if key not in self._unpacks:
            whole = Call((batch,), unpacked.kwargs if unpacked.args else {})
            self._unpacks[key] = self.accepts(unpacked) or not self.accepts(whole)
        return self._unpacks[key]

    def accepts(self, call: Call) -> bool:
        """Return whether the model's forward has parameters for these arguments."""
        try:
            inspect.signature(self._model.forward).bind(*call.args, **call.kwargs)
        except (TypeError, ValueError):
            return False
        return True


def as_keywords(value: Any) -> dict[str, Any] | None:
    """Return the items of a mapping or the fields of a dataclass; None for other values."""
    if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101 - the first is faster
        return value if type(value) is dict else dict(value.items())
    return dict(field_items(value)) if is_dataclass_instance(value) else None


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with what `ModelArguments.arrange` returned."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    if type(inputs) is Call:
        return model(*inputs.args, **inputs.kwargs)
    return model(**inputs) if type(inputs) is dict else model(*inputs)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))


class StaticBuffers(NamedTuple):
    """Copies of inputs at fixed addresses, which a captured graph reads."""

    values: Any
    """The inputs, nested as they were, with a buffer for each tensor."""
    tensors: list[torch.Tensor]
    """The buffers, in the order in which `signature` lists tensors."""


class UnsupportedInput(Exception):  # noqa: N818 - not an error: the call runs eagerly
    """An input is neither a tensor nor a hashable value, so that inputs cannot be compared."""


def signature(value: Any, leaves: list[torch.Tensor]) -> Hashable:
    """Return what a captured graph depends on, and append the tensors to `leaves` in order.

    That is the nesting, the shape, dtype, device and memory format of each tensor, and every value
    that is not a tensor.

    >>> one, other = (torch.ones(2, 3), 7), [torch.zeros(2, 3), 7]
    >>> leaves = []
    >>> signature(one, leaves) == signature(other, []), len(leaves)
    (False, 1)
    """
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return (
            value.shape,
            value.dtype,
            value.is_cuda,
            value.dim() == IMAGE_DIMS and is_channels_last(value),
        )
    kind = type(value)
    if isinstance(value, SEQUENCES):
        return kind, tuple([signature(item, leaves) for item in value])
    if isinstance(value, dict):
        return kind, tuple([(key, signature(item, leaves)) for key, item in value.items()])
    if kind in PLAIN_TYPES:
        # With the type: 1, 1.0 and True are equal, and a body can tell them apart.
        return kind, value
    if isinstance(value, Mapping):
        return kind, tuple([(key, signature(item, leaves)) for key, item in value.items()])
    if is_dataclass_instance(value):
        return kind, tuple([(key, signature(item, leaves)) for key, item in field_items(value)])
    try:
        hash(value)
    except TypeError:
        raise UnsupportedInput(kind.__name__) from None
    return kind, value


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether images are channels_last and not contiguous.

    With one channel or one pixel a tensor is both, and this returns False.
    """
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def move_inputs(value: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Move nested inputs to a device; with `channels_last`, convert floating-point images too."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if channels_last and tensor.dim() == IMAGE_DIMS and tensor.is_floating_point():
            return tensor.to(device, non_blocking=True, memory_format=torch.channels_last)
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return map_tensors(value, move)


def make_static_buffers(value: Any) -> StaticBuffers:
    """Copy nested inputs into new buffers."""
    buffers: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        buffers.append(torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()))
        return buffers[-1]

    return StaticBuffers(map_tensors(value, copy), buffers)


def copy_outputs(value: Any) -> Any:
    """Return detached copies of nested outputs, which no later call overwrites."""
    if isinstance(value, torch.Tensor):
        # Outputs of captured graphs are detached already.
        return (value.detach() if value.requires_grad else value).clone()
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def format_shapes(leaves: Sequence[torch.Tensor]) -> str:
    """Return the shapes and dtypes of inputs, for a message."""
    return (
        ", ".join(
            f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves
        )
        or "no tensors"
    )


_PLAIN = (bool, int, float, str)


def closure_values(function: Any) -> Callable[[], Hashable]:
    """Return a function that reads the numbers, strings and tensors that `function` closes over.

    A captured graph keeps the values of its capture; comparing them tells when to capture again.
    Of a tensor the address is compared, which the graph reads at each replay, not the content.

    >>> def outer():
    ...     weight = 1.0
    ...     def change(to):
    ...         nonlocal weight
    ...         weight = to
    ...     return change, closure_values(lambda: weight)
    >>> change, read = outer()
    >>> before = read()
    >>> change(2.0)
    >>> before, read()
    ((1.0,), (2.0,))
    """
    if not isinstance(function, FunctionType):
        return tuple
    cells, namespace = function.__closure__ or (), function.__globals__
    names = [name for name in _global_names(function) if _may_change(namespace.get(name))]
    if not cells and not names:
        return tuple
    return lambda: (
        *[_identity(_content(cell)) for cell in cells],
        *[_identity(namespace.get(name)) for name in names],
    )


def _global_names(function: FunctionType) -> list[str]:
    """Return the global variables that a function reads; `co_names` has its attributes too."""
    instructions = dis.get_instructions(function)
    read = {step.argval for step in instructions if step.opname == "LOAD_GLOBAL"}
    return sorted(read - vars(builtins).keys())


def _may_change(value: Any) -> bool:
    """Return whether a global may become another number or tensor. It may be assigned later."""
    return value is None or isinstance(value, (*_PLAIN, torch.Tensor))


def _identity(value: Any) -> Hashable:
    """Return a plain value, the memory of a tensor, and None for what is not compared."""
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    except RuntimeError:
        # A sparse tensor has no address.
        return id(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable is not assigned yet.
        return None
