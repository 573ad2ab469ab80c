"""The tensors that were made 16-bit, each the same object as before, with what keeps its exact value and what it was."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast as typed

import torch

from mezzo._casting import cast
from mezzo.optim.masters import Masters, Parameter


@dataclass(frozen=True, eq=False)
class _Before:
    masters: Masters
    grad_dtype: torch.dtype | None


class Weights:
    """Every converted tensor, by itself."""

    def __init__(self) -> None:
        self._before: dict[torch.Tensor, _Before] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._before

    def masters(self, tensor: torch.Tensor) -> Masters:
        """What keeps the tensor's float32 value."""
        return self._before[tensor].masters

    def is_exact(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's float32 value is kept exactly."""
        return self._before[tensor].masters.kind.exact

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's float32 value, a tensor of its own."""
        return self._before[tensor].masters.read(tensor)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the tensor's float32 value."""
        self._before[tensor].masters.write(tensor, value)

    def adopt(self, tensor: torch.Tensor, half: torch.dtype, grad_dtype: torch.dtype, masters: Masters, rollback: ExitStack) -> None:
        """Make a tensor 16-bit, its gradient too; the stack gets what puts back the very memory that was there."""
        parameter, gradient, pinned = typed("Parameter", tensor), tensor.grad, tensor.grad_dtype
        rollback.callback(_put_back, parameter, tensor.data, gradient, pinned)
        parameter.grad = None
        masters.adopt(parameter, half)
        _take_gradient(parameter, gradient, grad_dtype)
        self._before[tensor] = _Before(masters, pinned)

    def hand_over(self, tensor: torch.Tensor, masters: Masters) -> None:
        """Let other masters keep the exact value from now on, starting from the 16-bit one."""
        self._before[tensor] = replace(self._before[tensor], masters=masters)
        masters.adopt(typed("Parameter", tensor), tensor.dtype)

    def release(self) -> None:
        """Make every tensor float32 again, with its current exact value."""
        for tensor, before in self._before.items():
            parameter, gradient = typed("Parameter", tensor), tensor.grad
            parameter.grad = None
            before.masters.release(parameter)
            _take_gradient(parameter, gradient, before.grad_dtype)
        self._before.clear()


def _take_gradient(parameter: Parameter, gradient: torch.Tensor | None, grad_dtype: torch.dtype | None) -> None:
    # It follows the parameter's dtype by itself, unless somebody has set it: then it stays as it was set.
    if parameter.grad_dtype != grad_dtype:
        parameter.grad_dtype = grad_dtype
    if gradient is not None:
        parameter.grad = cast(gradient, grad_dtype or parameter.dtype)


def _put_back(parameter: Parameter, data: torch.Tensor, gradient: torch.Tensor | None, grad_dtype: torch.dtype | None) -> None:
    parameter.grad = None
    parameter.data = data
    if parameter.grad_dtype != grad_dtype:
        parameter.grad_dtype = grad_dtype
    parameter.grad = gradient
