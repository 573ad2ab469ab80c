"""`gluon.Parameter` and `gluon.ParameterDict`: MXNet's view of the parameters of a network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mezzo._dtypes import dtype_name
from mezzo._errors import CheckpointError, UnsupportedError, nearest
from mezzo.compat.mxnet._context import Context, context_of, one_device
from mezzo.compat.mxnet._dtype import numpy_dtype
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor
from mezzo.compat.mxnet._params import read_params, write_params

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm)
_NORM_NAMES = {"weight": "gamma", "bias": "beta"}


class DeferredInitializationError(RuntimeError):
    """A parameter has no shape before the first call of its network."""


class Parameter:
    """`gluon.Parameter`: a parameter or statistic of a layer, under MXNet's names and methods."""

    def __init__(self, name: str, module: nn.Module, attribute: str) -> None:
        self.name = name
        self._module, self._attribute = module, attribute

    @property
    def tensor(self) -> torch.Tensor:
        """torch's parameter or buffer."""
        tensor: torch.Tensor = getattr(self._module, self._attribute)
        return tensor

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape; None before the first call of a layer without `in_units` or `in_channels`."""
        return None if is_lazy(self.tensor) else tuple(self.tensor.shape)

    @property
    def dtype(self) -> Any:
        """The scalar type of NumPy."""
        return numpy_dtype(self.tensor.dtype)

    @property
    def grad_req(self) -> str:
        """`write` replaces the gradient at each backward, `add` sums, `null` computes none."""
        if not self.tensor.requires_grad:
            return "null"
        request: str = getattr(self.tensor, "grad_req", "write")
        return request

    @grad_req.setter
    def grad_req(self, request: str) -> None:
        if request not in ("write", "add", "null"):
            raise ValueError(f"Unknown grad_req {request!r}. Choose one of: write, add, null.")
        if isinstance(self.tensor, nn.Parameter):
            self.tensor.requires_grad = request != "null"
            self.tensor.grad_req = request  # type: ignore[attr-defined]

    @property
    def lr_mult(self) -> float:
        """Multiple of the trainer's learning rate."""
        return float(getattr(self.tensor, "lr_mult", 1.0))

    @lr_mult.setter
    def lr_mult(self, value: float) -> None:
        self.tensor.lr_mult = float(value)  # type: ignore[attr-defined]

    @property
    def wd_mult(self) -> float:
        """Multiple of the trainer's weight decay."""
        return float(getattr(self.tensor, "wd_mult", 1.0))

    @wd_mult.setter
    def wd_mult(self, value: float) -> None:
        self.tensor.wd_mult = float(value)  # type: ignore[attr-defined]

    @property
    def _data(self) -> list[NDArray] | None:
        """The values; None before they have a shape. Programs read it to find new parameters."""
        return None if is_lazy(self.tensor) else self.list_data()

    def data(self, ctx: Context | None = None) -> NDArray:
        """Return the values, an array that shares their memory."""
        return as_ndarray(self._materialized())

    def grad(self, ctx: Context | None = None) -> NDArray:
        """Return the gradient; zeros if no backward has computed one."""
        tensor = self._materialized()
        if not tensor.requires_grad:
            raise RuntimeError(
                f"Cannot get gradient array for Parameter {self.name!r} because"
                " grad_req='null'. Set its grad_req to 'write' first."
            )
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        return as_ndarray(tensor.grad)

    def list_data(self) -> list[NDArray]:
        """Return `data` in a list of one, as there is one context."""
        return [self.data()]

    def list_grad(self) -> list[NDArray]:
        """Return `grad` in a list of one."""
        return [self.grad()]

    def list_ctx(self) -> list[Context]:
        """Return the context in a list."""
        return [context_of(self.tensor)]

    def set_data(self, data: Any) -> None:
        """Copy values into the parameter; an uninitialized one takes their shape."""
        values = torch.as_tensor(as_tensor(data))
        with torch.no_grad():
            if is_lazy(self.tensor):
                self.tensor.materialize(values.shape)
            elif self.tensor.shape != values.shape:
                raise ValueError(
                    f"Parameter {self.name!r} has shape {tuple(self.tensor.shape)}, but set_data"
                    f" got {tuple(values.shape)}."
                )
            self.tensor.copy_(values)

    def zero_grad(self) -> None:
        """Set the gradient to zero."""
        if self.tensor.grad is not None:
            self.tensor.grad.zero_()

    def cast(self, dtype: Any) -> None:
        """Raise: MXNet casts single parameters, here `net.cast(dtype)` casts a whole network."""
        raise UnsupportedError("A single parameter is not cast. Call net.cast(dtype).")

    def __repr__(self) -> str:
        return f"Parameter {self.name} (shape={self.shape}, dtype={dtype_name(self.tensor.dtype)})"

    def _materialized(self) -> torch.Tensor:
        if is_lazy(self.tensor):
            raise DeferredInitializationError(
                f"Parameter {self.name!r} has not been initialized yet because initialization was"
                " deferred. Actual initialization happens during the first forward pass. Please"
                " pass one batch of data through the network before accessing Parameters."
            )
        return self.tensor


class ParameterDict(Mapping[str, Parameter]):
    """`gluon.ParameterDict`: the parameters and statistics of a network by name.

    Names are paths, with `gamma` and `beta` of normalizations: `features.1.gamma`.
    """

    def __init__(self, root: nn.Module, select: str | None = None) -> None:
        self._root = root
        pattern = re.compile(select or "")
        self._parameters = {
            name: parameter
            for name, parameter in named_parameters(root).items()
            if pattern.match(name)
        }

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._parameters:
            raise KeyError(f"Parameter {name!r} does not exist.{nearest(name, self._parameters)}")
        return self._parameters[name]

    def get(self, name: str, default: Any = None, **declaration: Any) -> Any:
        """Return a parameter or the default. Declaring a new one by its shape raises."""
        if declaration and name not in self:
            raise UnsupportedError(
                f"params.get({name!r}, {', '.join(f'{key}=...' for key in declaration)}) declares a"
                f" parameter in MXNet. Declare it as self.{name} = torch.nn.Parameter(...), and use"
                f" self.{name} in forward(self, x)."
            )
        return self._parameters.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __repr__(self) -> str:
        return "\n".join(["(", *(f"  {value!r}" for value in self.values()), ")"])

    def initialize(
        self, init: Any = None, ctx: Any = None, verbose: bool = False, force_reinit: bool = False
    ) -> None:
        """Initialize the network's parameters; see `Block.initialize`."""
        self._root.initialize(init, ctx, verbose, force_reinit)  # type: ignore[operator]

    def reset_ctx(self, ctx: Any) -> None:
        """Move the network to a context, or to the device of a list of contexts."""
        self._root.to(one_device(ctx))

    reset_device = reset_ctx

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for parameter in self.values():
            parameter.zero_grad()

    def setattr(self, name: str, value: Any) -> None:
        """Set `grad_req`, `lr_mult` or `wd_mult` of all parameters."""
        if name not in ("grad_req", "lr_mult", "wd_mult"):
            raise UnsupportedError(
                f"setattr({name!r}, ...) is not supported, only 'grad_req', 'lr_mult' and"
                " 'wd_mult'."
            )
        for parameter in self.values():
            setattr(parameter, name, value)

    def save(self, filename: str | os.PathLike[str], strip_prefix: str = "") -> None:
        """Write a `.params` file of MXNet."""
        write_params(
            filename,
            {
                name.removeprefix(strip_prefix): value._materialized().detach()
                for name, value in self.items()
            },
        )

    def load(
        self,
        filename: str | os.PathLike[str],
        ctx: Any = None,
        allow_missing: bool = False,
        ignore_extra: bool = False,
    ) -> None:
        """Read a `.params` file of MXNet; nothing is changed if a name or a shape differs."""
        self.load_dict(read_params(filename), os.fspath(filename), allow_missing, ignore_extra)
        if ctx is not None:
            self.reset_ctx(ctx)

    def load_dict(
        self,
        tensors: Mapping[str, torch.Tensor],
        source: str = "the dict",
        allow_missing: bool = False,
        ignore_extra: bool = False,
    ) -> None:
        """Copy tensors by name into the parameters."""
        tensors = {name.removeprefix("arg:").removeprefix("aux:"): t for name, t in tensors.items()}
        missing, extra = [*(self.keys() - tensors.keys())], [*(tensors.keys() - self.keys())]
        if missing and not allow_missing:
            raise CheckpointError(
                f"Parameter {min(missing)!r} is missing in {source!r}, with"
                f" {len(missing) - 1} others. Pass allow_missing=True to keep their values."
            )
        if extra and not ignore_extra:
            raise CheckpointError(
                f"Parameter {min(extra)!r} of {source!r} is not in this network, with"
                f" {len(extra) - 1} others. Pass ignore_extra=True to ignore them."
            )
        for name in self.keys() & tensors.keys():
            shape = self[name].shape
            if shape is not None and shape != tuple(tensors[name].shape):
                raise CheckpointError(
                    f"Parameter {name!r} of {source!r} has shape {tuple(tensors[name].shape)},"
                    f" expected {shape}."
                )
        for name in self.keys() & tensors.keys():
            self[name].set_data(tensors[name])


def named_parameters(root: nn.Module) -> dict[str, Parameter]:
    """Return the parameters and statistics of a module by MXNet's names.

    >>> list(named_parameters(nn.Sequential(nn.BatchNorm1d(2))))
    ['0.gamma', '0.beta', '0.running_mean', '0.running_var']
    """
    found = [
        Parameter(_gluon_name(path, module, attribute), module, attribute)
        for path, module in root.named_modules()
        for tensors in (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for attribute, _ in tensors
        if attribute != "num_batches_tracked"
    ]
    return {parameter.name: parameter for parameter in found}


def _gluon_name(path: str, module: nn.Module, attribute: str) -> str:
    name = _NORM_NAMES.get(attribute, attribute) if isinstance(module, _NORMS) else attribute
    return f"{path}.{name}" if path else name
