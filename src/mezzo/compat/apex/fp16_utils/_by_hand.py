"""Masters kept by hand, as Apex's `fp16_utils` does it: lists of 16-bit and float32 parameters, copied to and fro."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from mezzo._casting import cast

Parameters = list[nn.Parameter]


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[Parameters, Parameters]:  # noqa: FBT001, FBT002 - Apex's call shape
    """A model's trained parameters, and float32 masters of them for an optimizer: one each, or all in one flat tensor.

    >>> model_params, master_params = prep_param_lists(nn.Linear(2, 1).half())
    >>> [one.dtype for one in (*model_params, *master_params)]
    [torch.float16, torch.float16, torch.float32, torch.float32]
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return trained, [_master(cast(parameter.detach(), torch.float32).clone()) for parameter in trained]
    if len({parameter.dtype for parameter in trained}) > 1:
        raise TypeError("flat_master=True puts all parameters into one tensor, and these are of several dtypes. Leave flat_master out.")
    return trained, [_master(cast(parameters_to_vector(trained).detach(), torch.float32).clone())]


def _master(value: torch.Tensor) -> nn.Parameter:
    master = nn.Parameter(value)
    master.grad = torch.zeros_like(value)
    return master


def model_grads_to_master_grads(model_params: Parameters, master_params: Parameters, flat_master: bool = False) -> None:  # noqa: FBT001, FBT002
    """Copy the gradients of 16-bit parameters to their masters."""
    if flat_master:
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in model_params])
        master_params[0].grad = cast(flat, torch.float32).clone()
        return
    for parameter, master in zip(model_params, master_params, strict=True):
        master.grad = None if parameter.grad is None else cast(parameter.grad.detach(), torch.float32).clone()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


@torch.no_grad()
def master_params_to_model_params(model_params: Parameters, master_params: Parameters, flat_master: bool = False) -> None:  # noqa: FBT001, FBT002
    """Copy masters to the 16-bit parameters that they belong to, after a step."""
    values = master_params[0].split([parameter.numel() for parameter in model_params]) if flat_master else master_params
    for parameter, value in zip(model_params, values, strict=True):
        parameter.copy_(value.view_as(parameter))
