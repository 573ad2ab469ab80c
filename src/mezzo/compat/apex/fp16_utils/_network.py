"""Models made 16-bit by hand, as Apex's `fp16_utils` does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mezzo._torch import BatchNorm


class tofp16(nn.Module):  # noqa: N801 - Apex's spelling
    """A layer that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - Apex's call shape
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


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - Apex's spelling
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
        return self.network(*(one.half() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in inputs))


def to_python_float(tensor: torch.Tensor) -> float:
    """A tensor of one element as a number."""
    return float(tensor.item())
