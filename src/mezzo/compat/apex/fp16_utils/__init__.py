"""Apex's `fp16_utils`: master parameters by hand, loss scalers, networks in float16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm
from torch.nn.utils import parameters_to_vector

from mezzo._casting import cast
from mezzo._torch import BatchNorm
from mezzo.compat.apex.fp16_utils._optimizer import FP16_Optimizer
from mezzo.scaling.scale_state import ScaleRule, ScaleState

Parameters = list[nn.Parameter]


# Apex's call shape.
def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[Parameters, Parameters]:
    """A model's trained parameters, and float32 masters of them for an optimizer: one each, or all in one flat tensor.

    >>> model_params, master_params = prep_param_lists(nn.Linear(2, 1).half())
    >>> [one.dtype for one in (*model_params, *master_params)]
    [torch.float16, torch.float16, torch.float32, torch.float32]
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return trained, [
            _master(cast(parameter.detach(), torch.float32).clone()) for parameter in trained
        ]
    if len({parameter.dtype for parameter in trained}) > 1:
        raise TypeError(
            "flat_master=True puts all parameters into one tensor, and these are of several dtypes."
            " Leave flat_master out."
        )
    return trained, [_master(cast(parameters_to_vector(trained).detach(), torch.float32).clone())]


def _master(value: torch.Tensor) -> nn.Parameter:
    master = nn.Parameter(value)
    master.grad = torch.zeros_like(value)
    return master


def model_grads_to_master_grads(
    model_params: Parameters, master_params: Parameters, flat_master: bool = False
) -> None:
    """Copy the gradients of 16-bit parameters to their masters."""
    if flat_master:
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in model_params])
        master_params[0].grad = cast(flat, torch.float32).clone()
        return
    for parameter, master in zip(model_params, master_params, strict=True):
        master.grad = (
            None if parameter.grad is None else cast(parameter.grad.detach(), torch.float32).clone()
        )


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


@torch.no_grad()
def master_params_to_model_params(
    model_params: Parameters, master_params: Parameters, flat_master: bool = False
) -> None:
    """Copy masters to the 16-bit parameters that they belong to, after a step."""
    values = (
        master_params[0].split([parameter.numel() for parameter in model_params])
        if flat_master
        else master_params
    )
    for parameter, value in zip(model_params, values, strict=True):
        parameter.copy_(value.view_as(parameter))


class LossScaler:
    """A scale that stays.

    >>> LossScaler(128).loss_scale
    128
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale: float = scale

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.cur_scale

    # Apex's call shape.
    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether gradients are not finite: nobody looks."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale to what was found: it stays."""

    def scale_gradient(
        self, module: object, grad_in: tuple[torch.Tensor, ...], grad_out: object
    ) -> tuple[torch.Tensor, ...]:
        """Gradients times the scale; made for `register_full_backward_hook`."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    # Apex's call shape.
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that halves on overflow, to no less than 1, and doubles after so many iterations without one.

    >>> scaler = DynamicLossScaler(init_scale=8.0)
    >>> scaler.update_scale(True)
    >>> scaler.loss_scale
    4.0
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self._good = 0

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient is not finite; this waits for the device."""
        gradients = (parameter.grad for parameter in params if parameter.grad is not None)
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale to what was found."""
        rule = ScaleRule(
            self.scale_factor, 1.0 / self.scale_factor, self.scale_window, min_scale=1.0
        )
        after = rule.after(ScaleState(self.cur_scale, self._good), found_nonfinite=bool(overflow))
        self.cur_scale, self._good = after.scale, after.growth_tracker


class tofp16(nn.Module):  # noqa: N801 - Apex's spelling
    """A layer that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The input in float16."""
        return input.half()


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own parameters and buffers in place, not those of its parts."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's parameters and buffers in place, but for batch norms with weights of their own."""
    for module in network.modules():
        if not (isinstance(module, BatchNorm) and module.affine):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make batch norms with weights of their own float32 again."""
    for part in module.modules():
        if isinstance(part, BatchNorm) and part.affine:
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """A model that takes float32 inputs and computes in float16, batch norms in float32."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


class FP16Model(nn.Module):
    """A model in float16, batch norms in float32, whose inputs are cast."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """The model's own forward over float16 inputs."""
        return self.network(
            *(
                one.half() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
                for one in inputs
            )
        )


def to_python_float(tensor: torch.Tensor) -> float:
    """A tensor of one element as a number."""
    return float(tensor.item())


__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
