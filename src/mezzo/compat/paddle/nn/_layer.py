"""`paddle.nn.Layer`: torch's `nn.Module` with Paddle's methods, and its containers."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from mezzo.compat.paddle._dtypes import parse_dtype
from mezzo.compat.paddle._places import default_device
from mezzo.compat.paddle._tensor import (
    Parameter,
    as_tensor,
    parse_to,
    plain_tensor,
)
from mezzo.compat.paddle.nn.initializer import Constant, Initializer, ParamAttr, XavierUniform


class Layer(nn.Module):
    """`paddle.nn.Layer`: base class of layers and networks.

    Parameters are on the default place (`paddle.set_device`). torch's modules may be sublayers.

    >>> from mezzo.compat import paddle
    >>> class Net(Layer):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = paddle.nn.Linear(4, 2)
    ...
    ...     def forward(self, x):
    ...         return self.fc(x)
    >>> [parameter.shape for parameter in Net().parameters()]
    [[4, 2], [2]]
    """

    def __init__(self, name_scope: str | None = None, dtype: Any = "float32") -> None:
        super().__init__()
        self._name_scope = name_scope or type(self).__name__.lower()
        self._dtype = dtype

    # -- parameters --------------------------------------------------------------------------------

    def create_parameter(
        self,
        shape: Sequence[int],
        attr: Any = None,
        dtype: Any = None,
        is_bias: bool = False,
        default_initializer: Initializer | None = None,
    ) -> Any:
        """Return a new parameter, Xavier-uniform or zero by default; None for `attr=False`."""
        default = default_initializer or (Constant(0.0) if is_bias else XavierUniform())
        parameter = create_parameter(shape, attr, dtype or self._dtype, default)
        if parameter is not None and parameter.name is None:
            scope, kind = self._unique_scope(), "b" if is_bias else "w"
            parameter.name = f"{scope}.{kind}_{next(_numbers[scope, kind])}"
        return parameter

    def _unique_scope(self) -> str:
        """Return the name of this layer in its parameters' names, such as `conv2d_0`."""
        if "_scope" not in self.__dict__:
            words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(self).__name__)
            kind = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
            self.__dict__["_scope"] = f"{kind}_{next(_numbers[kind, ''])}"
        return str(self.__dict__["_scope"])

    def parameters(self, recurse: bool = True, *, include_sublayers: bool = True) -> list[Any]:  # type: ignore[override]
        """Return the parameters, as a list."""
        return list(super().parameters(recurse and include_sublayers))

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        *,
        include_sublayers: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        """Yield the names and parameters."""
        return super().named_parameters(prefix, recurse and include_sublayers, remove_duplicate)

    def buffers(self, recurse: bool = True, *, include_sublayers: bool = True) -> list[Any]:  # type: ignore[override]
        """Return the buffers, as a list."""
        return list(super().buffers(recurse and include_sublayers))

    def add_parameter(self, name: str, parameter: Any) -> Any:
        """Add a parameter and return it."""
        self.register_parameter(name, parameter)
        return parameter

    def register_buffer(  # type: ignore[override]
        self, name: str, tensor: Any, persistable: bool = True, **kwargs: Any
    ) -> None:
        """Add a buffer; `persistable` is torch's `persistent`."""
        super().register_buffer(name, tensor, kwargs.get("persistent", persistable))

    def clear_gradients(self, set_to_zero: bool = True) -> None:
        """Zero all gradients, or drop them."""
        self.zero_grad(set_to_none=not set_to_zero)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device, cast to a dtype, or both; also by Paddle's names and places."""
        args, kwargs = parse_to(args, kwargs)
        return super().to(*args, **kwargs) if args or kwargs else self

    def astype(self, dtype: Any) -> Self:
        """Cast all floating-point parameters and buffers."""
        return super().to(dtype=parse_dtype(dtype))

    def float16(self, excluded_layers: Any = None) -> Self:
        """Cast all floating-point parameters and buffers to float16."""
        _refuse_excluded(excluded_layers)
        return self.astype("float16")

    # -- sublayers ---------------------------------------------------------------------------------

    def add_sublayer(self, name: str, sublayer: nn.Module) -> nn.Module:
        """Add a sublayer and return it."""
        self.add_module(str(name), sublayer)
        return sublayer

    def sublayers(self, include_self: bool = False) -> list[nn.Module]:
        """Return all layers inside, at any depth."""
        return [layer for _, layer in self.named_sublayers(include_self=include_self)]

    def named_sublayers(
        self, prefix: str = "", include_self: bool = False, layers_set: Any = None
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the names and layers inside, at any depth."""
        for name, layer in self.named_modules(layers_set, prefix):
            if include_self or layer is not self:
                yield name, layer

    def register_forward_post_hook(self, hook: Any) -> Any:
        """Call `hook(layer, inputs, output)` after each forward pass."""
        return self.register_forward_hook(hook)

    def full_name(self) -> str:
        """Return the name of the layer's class, or its name scope."""
        return self._name_scope

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return all parameters and buffers by name, as Paddle tensors."""
        state = super().state_dict(*args, **kwargs)
        if args or kwargs.get("destination") is not None or kwargs.get("keep_vars"):
            # A layer above collects these.
            return state
        for name, value in state.items():
            if type(value) is torch.Tensor:
                state[name] = as_tensor(value)
        return state

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load tensors or arrays; return the names that were missing and those not used.

        As in Paddle a missing entry, or one of another shape, is left out with a warning.
        `load_state_dict` raises instead.
        """
        current = self.state_dict()
        fitting = {}
        for name, value in state_dict.items():
            tensor = plain_tensor(torch.as_tensor(value))
            if name in current and tuple(current[name].shape) != tuple(tensor.shape):
                warnings.warn(
                    f"Skip loading for {name}. {name} receives a shape {list(tensor.shape)}, but"
                    f" the expected shape is {current[name].shape}.",
                    UserWarning,
                    stacklevel=2,
                )
            else:
                fitting[name] = tensor
        result = self.load_state_dict(fitting, strict=False)
        for name in result.missing_keys:
            if name not in state_dict:
                warnings.warn(
                    f"Skip loading for {name}. {name} is not found in the provided dict.",
                    UserWarning,
                    stacklevel=2,
                )
        return result.missing_keys, result.unexpected_keys

    set_dict = set_state_dict


class LayerList(nn.ModuleList, Layer):
    """`paddle.nn.LayerList`: layers in a list."""

    def __init__(self, sublayers: Iterable[nn.Module] | None = None) -> None:
        super().__init__(sublayers)


class Sequential(nn.Sequential, Layer):
    """`paddle.nn.Sequential`: layers that are called one after the other.

    >>> from mezzo.compat import paddle
    >>> net = Sequential(("fc", paddle.nn.Linear(2, 3)), ("act", paddle.nn.ReLU()))
    >>> [name for name, _ in net.named_sublayers()]
    ['fc', 'act']
    """

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            name, module = layer if isinstance(layer, tuple | list) else (index, layer)
            self.add_module(str(name), module)


class ParameterList(nn.ParameterList, Layer):
    """`paddle.nn.ParameterList`: parameters in a list."""


class LayerDict(nn.ModuleDict, Layer):
    """`paddle.nn.LayerDict`: layers by name."""

    def __init__(self, sublayers: Any = None) -> None:
        super().__init__(sublayers)


_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
"""The next number of each kind of layer and parameter."""


def create_parameter(
    shape: Sequence[int], attr: Any, dtype: Any, default: Initializer
) -> Parameter | None:
    """Return a new parameter on the default place.

    `attr` is a `ParamAttr`, an initializer, a name, None for the default, or False for none.
    """
    if attr is False:
        return None
    attribute = attr if isinstance(attr, ParamAttr) else ParamAttr()
    initializer = attr if callable(attr) else attribute.initializer
    device, wanted = default_device(), parse_dtype(dtype)
    sizes = [int(size) for size in shape]
    parameter = Parameter(
        torch.empty(sizes, device=device, dtype=wanted), requires_grad=attribute.trainable
    )
    (initializer or default)(parameter)
    parameter.name = attr if isinstance(attr, str) else attribute.name
    parameter.optimize_attr = {"learning_rate": attribute.learning_rate}
    parameter.regularizer = attribute.regularizer
    return parameter


def _refuse_excluded(excluded_layers: Any) -> None:
    if excluded_layers is not None:
        raise ValueError(
            "excluded_layers is not supported here. Use paddle.amp.decorate(models=layer,"
            " level='O2', excluded_layers=...)."
        )
