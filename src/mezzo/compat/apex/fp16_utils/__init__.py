"""`apex.fp16_utils`: manual master weights, loss scalers, models in float16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm
from torch.nn.utils import parameters_to_vector

from mezzo._casting import cast
from mezzo._torch import BatchNorm
from mezzo.compat._missing import module_getattr
from mezzo.compat.apex._substitutions import SUBSTITUTIONS
from mezzo.compat.apex.fp16_utils._optimizer import FP16_Optimizer
from mezzo.scaling.scale_state import ScaleRule, ScaleState

Parameters = list[nn.Parameter]


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[Parameters, Parameters]:
    """Return a model's trainable parameters and float32 masters of them for an optimizer.

    With `flat_master` there is one flat master tensor for all parameters.

    >>> model_params, master_params = prep_param_lists(nn.Linear(2, 1).half())
    >>> [parameter.dtype for parameter in (*model_params, *master_params)]
    [torch.float16, torch.float16, torch.float32, torch.float32]
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return trained, [
            _master(cast(parameter.detach(), torch.float32).clone()) for parameter in trained
        ]
    if len({parameter.dtype for parameter in trained}) > 1:
        raise TypeError(
            "flat_master=True needs parameters of one dtype, got several dtypes. Leave flat_master"
            " out."
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
    """Copy masters to their 16-bit parameters, after a step."""
    values = (
        master_params[0].split([parameter.numel() for parameter in model_params])
        if flat_master
        else master_params
    )
    for parameter, value in zip(model_params, values, strict=True):
        parameter.copy_(value.view_as(parameter))


class LossScaler:
    """Scale losses by a constant.

    >>> LossScaler(128).loss_scale
    128
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale: float = scale

    @property
    def loss_scale(self) -> float:
        """The loss scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False: a static scale does not check gradients."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the scale is static."""

    def scale_gradient(
        self, module: object, grad_in: tuple[torch.Tensor, ...], grad_out: object
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients times the scale, as a hook for `register_full_backward_hook`."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward on the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """Divide the scale on overflow, down to 1, and multiply it after `scale_window` good steps.

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
        self._unskipped = 0

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient is non-finite. This synchronizes."""
        gradients = (parameter.grad for parameter in params if parameter.grad is not None)
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)

    def update_scale(self, overflow: bool) -> None:
        """Grow the scale or back off."""
        rule = ScaleRule(
            self.scale_factor, 1.0 / self.scale_factor, self.scale_window, min_scale=1.0
        )
        state = rule.after(
            ScaleState(self.cur_scale, self._unskipped), found_nonfinite=bool(overflow)
        )
        self.cur_scale, self._unskipped = state.scale, state.growth_tracker


class tofp16(nn.Module):
    """Cast the input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input in float16."""
        return input.half()


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own parameters and buffers in place, not those of its children."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's parameters and buffers in place, except affine batch norms."""
    for module in network.modules():
        if not (isinstance(module, BatchNorm) and module.affine):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast affine batch norms back to float32."""
    for child in module.modules():
        if isinstance(child, BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Return a float16 model that casts its inputs; batch norms stay float32."""
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"network_to_half takes a model, got {type(network).__name__}. Cast a tensor with"
            " tensor.half()."
        )
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


class FP16Model(nn.Module):
    """Wrap a model in float16 with float32 batch norms, and cast its inputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Run the model on float16 inputs."""
        return self.network(*(_to_half(value) for value in inputs))


def _to_half(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if floating else value


def to_python_float(tensor: torch.Tensor) -> float:
    """Return the value of a tensor with one element."""
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


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
