"""The 16-bit parameters and buffers of decorated models, and where their float32 values are."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple
from typing import cast as typed
from weakref import WeakSet

import torch

from mezzo._casting import cast
from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.master_weights import MasterWeights, Parameter
from mezzo.scaling.mesh import local, set_local


class HalfWeights:
    """The tensors that one `decorate` has cast to 16 bits, with their masters."""

    _instances: ClassVar[WeakSet[HalfWeights]] = WeakSet()

    def __init__(self) -> None:
        self._records: dict[torch.Tensor, _Record] = {}
        self._instances.add(self)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HalfWeights | None:
        """Return the instance that has a tensor, of all decorated models; None if none has it."""
        return next((weights for weights in cls._instances if tensor in weights), None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._records

    def masters(self, tensor: torch.Tensor) -> MasterWeights:
        """Return the masters that hold the float32 value of a tensor."""
        return self._records[tensor].masters

    def all_masters(self) -> list[MasterWeights]:
        """Return all masters of these tensors, each once."""
        return list(dict.fromkeys(record.masters for record in self._records.values()))

    def is_exact(self, tensor: torch.Tensor) -> bool:
        """Return whether the float32 value of a tensor is stored exactly."""
        return self._records[tensor].masters.format.exact

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a tensor, as a new tensor."""
        return self._records[tensor].masters.read(tensor)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the float32 value of a tensor."""
        self._records[tensor].masters.write(tensor, value)

    def convert(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        masters: MasterWeights,
        rollback: ExitStack,
    ) -> None:
        """Cast a tensor and its gradient in place; `rollback` gets what restores their memory."""
        parameter = typed("Parameter", tensor)
        gradient, old_grad_dtype = tensor.grad, tensor.grad_dtype
        data = local(tensor.data)
        rollback.callback(_set_tensors, parameter, data, gradient, old_grad_dtype)
        parameter.grad = None
        masters.adopt(parameter, dtype)
        _cast_gradient(parameter, gradient, grad_dtype)
        self._records[tensor] = _Record(masters, old_grad_dtype, _Properties.of(tensor))

    def hand_over(self, tensor: torch.Tensor, masters: MasterWeights) -> None:
        """Store the float32 value of a tensor in other masters from now on."""
        record = self._records[tensor]
        masters.take_over(tensor, record.masters)
        self._records[tensor] = replace(record, masters=masters)

    def refuse_changed(self) -> None:
        """Raise `UnsupportedError` if a tensor was cast, moved or reshaped since `convert`."""
        for tensor, record in self._records.items():
            current = _Properties.of(tensor)
            if current != record.converted:
                raise UnsupportedError(
                    f"decorate made a tensor {record.converted}, and now it is {current}, which"
                    " does not fit its master. Nothing was changed. First make it what it was:"
                    f" parameter.data = parameter.data.to({str(record.converted.device)!r},"
                    f" {record.converted.dtype})."
                )

    def restore(self) -> None:
        """Cast every tensor back to float32, with its current float32 value."""
        for tensor, record in self._records.items():
            parameter, gradient = typed("Parameter", tensor), tensor.grad
            parameter.grad = None
            record.masters.release(parameter)
            _cast_gradient(parameter, gradient, record.grad_dtype)
        self._records.clear()


class _Properties(NamedTuple):
    """Properties of a tensor that must not change while it is decorated."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Properties:
        return cls(tensor.dtype, tensor.device, tensor.shape)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} of shape {tuple(self.shape)} on {self.device}"


@dataclass(frozen=True, eq=False)
class _Record:
    """A tensor that was cast to 16 bits: its masters, and what restores it."""

    masters: MasterWeights
    grad_dtype: torch.dtype | None
    """The tensor's `grad_dtype` before it was cast."""
    converted: _Properties
    """Properties of the tensor after it was cast."""


def _cast_gradient(
    parameter: Parameter, gradient: torch.Tensor | None, grad_dtype: torch.dtype | None
) -> None:
    # Set only if it differs: unless it was set, grad_dtype follows the dtype of the parameter.
    if parameter.grad_dtype != grad_dtype:
        parameter.grad_dtype = grad_dtype
    if gradient is not None:
        parameter.grad = cast(gradient, grad_dtype or parameter.dtype)


def _set_tensors(
    parameter: Parameter,
    data: torch.Tensor,
    gradient: torch.Tensor | None,
    grad_dtype: torch.dtype | None,
) -> None:
    parameter.grad = None
    set_local(parameter, data)
    if parameter.grad_dtype != grad_dtype:
        parameter.grad_dtype = grad_dtype
    parameter.grad = gradient


def add_masters_when_trained(binding: OptimizerBinding, weights: HalfWeights) -> None:
    """Create master weights for parameters that were added or unfrozen after the binding.

    They get them before the first step for which they have a gradient.
    """

    def add_masters(missing: list[torch.Tensor]) -> None:
        for parameter in missing:
            if parameter not in weights and HalfWeights.of(parameter) is not None:
                raise UnsupportedError(
                    f"{type(binding.optimizer).__name__} was given a parameter of shape"
                    f" {tuple(parameter.shape)} that another mezzo.decorate has cast to"
                    f" {parameter.dtype}, so that it does not have its master weights. Decorate"
                    " both models with both optimizers in one call: decorate([model, other],"
                    " [optimizer, other_optimizer])."
                )
        for parameter in missing:
            if parameter in weights:
                weights.hand_over(parameter, binding.masters)

    binding.add_masters_with(add_masters)
