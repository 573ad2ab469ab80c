"""Bytes of the states that an optimizer keeps of a parameter, counted without allocating them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch

from mezzo._errors import PolicyError, UnsupportedError, unknown
from mezzo.optim.optimizers import LAMB, Lion
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], Optimizer]
"""An optimizer class, or any function of parameters that returns an optimizer."""
OptimizerArg = str | MakeOptimizer | Optimizer | list[Optimizer] | tuple[Optimizer, ...]
"""The name of an optimizer, its class, or the optimizers of a model themselves."""

_MATRIX = 2
"""Dimensions of the parameters that Muon updates."""
_HOST_OPTIONS = {"fused": False, "foreach": False, "capturable": False}
"""Options for a step on the meta device, where torch has no kernels for the others."""


class StateBytes(NamedTuple):
    """Bytes of the states of one parameter."""

    elements: int
    """Of tensors with at least one dimension, such as moments."""
    scalars: int
    """Of step counts and the like."""


class OptimizerStates:
    """Counts the states that optimizers keep, by running their step on the meta device.

    >>> states = OptimizerStates("AdamW")
    >>> states.of(torch.nn.Parameter(torch.empty(8, 4)), (8, 4), torch.float32)
    StateBytes(elements=256, scalars=4)
    """

    def __init__(self, argument: OptimizerArg) -> None:
        self.optimizers: tuple[Optimizer, ...] = ()
        """The optimizers that were passed themselves; they update their own parameters only."""
        self._make: MakeOptimizer | None = None
        self._made_for: dict[int, MakeOptimizer] = {}
        self._counted: dict[tuple[Any, ...], StateBytes] = {}
        if isinstance(argument, Optimizer | list | tuple):
            self.optimizers = _instances(argument)
            self._made_for = {
                id(parameter): make
                for optimizer in self.optimizers
                for group in optimizer.param_groups
                for make in (_like(optimizer, group),)
                for parameter in group["params"]
            }
            self.name = " and ".join(
                dict.fromkeys(type(optimizer).__name__ for optimizer in self.optimizers)
            )
        else:
            self._make = _read_class(argument)
            self.name = _name(self._make)

    def updates(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether an optimizer has this parameter and it is trained."""
        return parameter.requires_grad and (
            self._make is not None or id(parameter) in self._made_for
        )

    def of(
        self, parameter: torch.nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype
    ) -> StateBytes:
        """Return the bytes of the states of a parameter, or of a shard of this shape."""
        make = self._made_for.get(id(parameter), self._make)
        if make is None:
            return StateBytes(0, 0)
        if make is torch.optim.Muon and len(shape) != _MATRIX:
            # Muon refuses them, and AdamW for these is the common choice.
            make = torch.optim.AdamW
        key = (make, shape, dtype)
        if key not in self._counted:
            self._counted[key] = _count(make, shape, dtype)
        return self._counted[key]


def _count(make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> StateBytes:
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    try:
        optimizer = make([parameter])
    except (TypeError, ValueError) as error:
        raise PolicyError(
            f"optimizer={_name(make)} cannot be made for a parameter of shape {shape}: {error}"
            " Pass the optimizers of the model themselves, or a function of parameters:"
            " optimizer=functools.partial(MyOptimizer, rank=4)."
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise PolicyError(
            f"optimizer={_name(make)} returned {type(optimizer).__name__}, not a"
            " torch.optim.Optimizer. Pass a name such as 'AdamW', a class, or an optimizer."
        )
    failed: Exception | None = None
    try:
        optimizer.step()
    # A step of other code may raise anything.
    except Exception as error:  # noqa: BLE001
        # Adafactor and ASGD read a value, which meta tensors do not have, when their states exist.
        failed = error
    states = optimizer.state.get(parameter, {})
    if failed is not None and not states:
        raise UnsupportedError(
            f"The states of {_name(make)} cannot be counted: its step raises"
            f" {type(failed).__name__} ({failed}) for a dense parameter without values. Pass the"
            " optimizer whose states come closest, such as optimizer='AdamW'."
        ) from failed
    tensors = [value for value in states.values() if isinstance(value, torch.Tensor)]
    return StateBytes(
        sum(tensor.nbytes for tensor in tensors if tensor.dim()),
        sum(tensor.nbytes for tensor in tensors if not tensor.dim()),
    )


def _like(optimizer: Optimizer, group: dict[str, Any]) -> MakeOptimizer:
    """Return what makes an optimizer with the class and the options of a group."""
    accepted = signature(type(optimizer)).parameters
    options = {name: value for name, value in group.items() if name in accepted}
    options |= {name: value for name, value in _HOST_OPTIONS.items() if name in accepted}
    if isinstance(options.get("lr"), torch.Tensor):
        # Reading a tensor on a device would synchronize, and states do not depend on it.
        options["lr"] = 1e-3
    return partial(type(optimizer), **{k: v for k, v in options.items() if k != "params"})


def _instances(argument: Optimizer | list[Any] | tuple[Any, ...]) -> tuple[Optimizer, ...]:
    optimizers = (argument,) if isinstance(argument, Optimizer) else tuple(argument)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise PolicyError(
                f"optimizer has {optimizer!r}, which is not a torch.optim.Optimizer. Pass one name"
                " or class, or a list of the model's optimizers."
            )
    if not any(parameters(optimizer) for optimizer in optimizers):
        raise PolicyError(
            f"optimizer={argument!r} has no parameters. Pass a name such as 'AdamW', a class, or"
            " the optimizers of the model."
        )
    return optimizers


def _read_class(argument: str | MakeOptimizer) -> MakeOptimizer:
    if isinstance(argument, str):
        return _class_named(argument)
    if not callable(argument):
        raise PolicyError(
            f"optimizer={argument!r} is not an optimizer. Pass a name such as 'AdamW', a class, or"
            " the optimizers of the model."
        )
    return argument


def _class_named(name: str) -> type[Optimizer]:
    known = {"LAMB": LAMB, "Lion": Lion} | {
        cls.__name__: cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    by_lower = {name.lower(): found for name, found in known.items()}
    if name.lower() not in by_lower:
        raise PolicyError(unknown("optimizer", name, sorted(known)))
    return by_lower[name.lower()]


def _name(make: Any) -> str:
    inner = make.func if isinstance(make, partial) else make
    return getattr(inner, "__name__", None) or repr(inner)
