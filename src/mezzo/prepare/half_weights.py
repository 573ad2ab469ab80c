"""16-bit parameters and buffers of a model, their exact values, and master weights for parameters that are trained later."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ClassVar
from typing import cast as typed
from weakref import WeakSet

import torch

from mezzo._casting import cast
from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.master_weights import MasterWeights, Parameter


@dataclass(frozen=True, eq=False)
class _Before:
    masters: MasterWeights
    grad_dtype: torch.dtype | None
    converted: tuple[torch.dtype, torch.device, torch.Size]
    """What the tensor was made."""


class HalfWeights:
    """Every converted tensor, by itself."""

    _all: ClassVar[WeakSet[HalfWeights]] = WeakSet()

    def __init__(self) -> None:
        self._before: dict[torch.Tensor, _Before] = {}
        self._all.add(self)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HalfWeights | None:
        """The converted tensors that a tensor is among, whichever models they are of."""
        return next((weights for weights in cls._all if tensor in weights), None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._before

    def masters(self, tensor: torch.Tensor) -> MasterWeights:
        """What keeps the tensor's float32 value."""
        return self._before[tensor].masters

    def all_masters(self) -> list[MasterWeights]:
        """Everything that keeps float32 values of these tensors."""
        return list(dict.fromkeys(before.masters for before in self._before.values()))

    def is_exact(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's float32 value is kept exactly."""
        return self._before[tensor].masters.format.exact

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's float32 value, a tensor of its own."""
        return self._before[tensor].masters.read(tensor)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the tensor's float32 value."""
        self._before[tensor].masters.write(tensor, value)

    def convert(
        self,
        tensor: torch.Tensor,
        half: torch.dtype,
        grad_dtype: torch.dtype,
        masters: MasterWeights,
        rollback: ExitStack,
    ) -> None:
        """Make a tensor 16-bit, its gradient too; the stack gets what puts back the very memory that was there."""
        parameter, gradient, pinned = typed("Parameter", tensor), tensor.grad, tensor.grad_dtype
        rollback.callback(_put_back, parameter, tensor.data, gradient, pinned)
        parameter.grad = None
        masters.adopt(parameter, half)
        _take_gradient(parameter, gradient, grad_dtype)
        self._before[tensor] = _Before(masters, pinned, _looks(tensor))

    def hand_over(self, tensor: torch.Tensor, masters: MasterWeights) -> None:
        """Let other masters keep the exact value from now on."""
        before, parameter, data, gradient, pinned = (
            self._before[tensor],
            typed("Parameter", tensor),
            tensor.data,
            tensor.grad,
            tensor.grad_dtype,
        )
        self._before[tensor] = replace(before, masters=masters)
        parameter.grad = None
        before.masters.release(parameter)
        masters.adopt(parameter, data.dtype)
        # Its memory stays: a captured graph may read it there.
        _put_back(parameter, data.copy_(parameter.data), gradient, pinned)

    def refuse_changed(self) -> None:
        """Refuse to go on where a tensor was cast, moved or reshaped since: its master does not fit it."""
        for tensor, before in self._before.items():
            if _looks(tensor) != before.converted:
                dtype, device, _ = before.converted
                raise UnsupportedError(
                    f"decorate made a tensor {_words(before.converted)}, and now it is"
                    f" {_words(_looks(tensor))}, which its master does not fit. Nothing was"
                    " changed. First make it what it was: parameter.data ="
                    f" parameter.data.to({str(device)!r}, {dtype})."
                )

    def restore(self) -> None:
        """Make every tensor float32 again, with its current exact value."""
        for tensor, before in self._before.items():
            parameter, gradient = typed("Parameter", tensor), tensor.grad
            parameter.grad = None
            before.masters.release(parameter)
            _take_gradient(parameter, gradient, before.grad_dtype)
        self._before.clear()


def _looks(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _words(looks: tuple[torch.dtype, torch.device, torch.Size]) -> str:
    dtype, device, shape = looks
    return f"{dtype_name(dtype)} of shape {tuple(shape)} on {device}"


def _take_gradient(
    parameter: Parameter, gradient: torch.Tensor | None, grad_dtype: torch.dtype | None
) -> None:
    # It follows the parameter's dtype by itself, unless somebody has set it: then it stays as it
    # was set.
    if parameter.grad_dtype != grad_dtype:
        parameter.grad_dtype = grad_dtype
    if gradient is not None:
        parameter.grad = cast(gradient, grad_dtype or parameter.dtype)


def _put_back(
    parameter: Parameter,
    data: torch.Tensor,
    gradient: torch.Tensor | None,
    grad_dtype: torch.dtype | None,
) -> None:
    parameter.grad = None
    parameter.data = data
    if parameter.grad_dtype != grad_dtype:
        parameter.grad_dtype = grad_dtype
    parameter.grad = gradient


def add_masters_when_trained(
    bound: OptimizerBinding, weights: HalfWeights, undo: ExitStack
) -> None:
    """Give masters to parameters that a bound optimizer meets without one; the stack gets what ends that."""

    def newcomers(found: list[torch.Tensor]) -> None:
        for parameter in found:
            if parameter not in weights and HalfWeights.of(parameter) is not None:
                raise UnsupportedError(
                    f"{type(bound.optimizer).__name__} was given a parameter of shape"
                    f" {tuple(parameter.shape)} that another mezzo.decorate has made"
                    f" {parameter.dtype}, and whose master it does not know. Decorate both models"
                    " with both optimizers in one call: decorate([model, other], [optimizer,"
                    " other_optimizer])."
                )
        for parameter in found:
            if parameter in weights:
                weights.hand_over(parameter, bound.masters)

    bound.on_missing_masters = newcomers
    undo.callback(setattr, bound, "on_missing_masters", None)
