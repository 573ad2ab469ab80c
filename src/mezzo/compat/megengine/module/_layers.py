"""Layers of `megengine.module`: torch's, with MegEngine's arguments and initial values."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import nn

from mezzo.compat.megengine.device import default_device
from mezzo.compat.megengine.functional.nn import counts_padding, softmax_axis
from mezzo.compat.megengine.module._base import Module

Size = Any
"""An int, or one for each dimension."""


def _start(layer: nn.Module, fan_in: int) -> None:
    """Set the initial values of MegEngine: a normal distribution, and biases of zero."""
    nn.init.normal_(layer.weight, 0.0, sqrt(1.0 / fan_in))  # type: ignore[arg-type]
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


class Linear(nn.Linear, Module):
    """`M.Linear`: weights of shape (out, in), normal with variance 1 / in; biases of zero.

    >>> Linear(4, 2).bias.detach().tolist()
    [0.0, 0.0]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        compute_mode: str = "default",
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, default_device())
        self.name = name

    def reset_parameters(self) -> None:
        """Set the initial values."""
        _start(self, self.in_features)


class _Conv(Module):
    """Arguments and initial values of all convolutions."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        conv_mode: str = "cross_correlation",
        compute_mode: str = "default",
        padding_mode: str = "zeros",
        name: str | None = None,
    ) -> None:
        _check_conv_mode(conv_mode)
        super(Module, self).__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            default_device(),
        )
        self.name = name

    def reset_parameters(self) -> None:
        """Set the initial values."""
        weight: torch.Tensor = self.weight  # type: ignore[assignment]
        _start(self, weight[0].numel())


class Conv1d(_Conv, nn.Conv1d):
    """`M.Conv1d`: `torch.nn.Conv1d` with MegEngine's arguments and initial values."""


class Conv2d(_Conv, nn.Conv2d):
    """`M.Conv2d`: `torch.nn.Conv2d` with MegEngine's arguments and initial values.

    >>> Conv2d(4, 8, 3, groups=2, bias=False).weight.shape
    torch.Size([8, 2, 3, 3])
    """


class Conv3d(_Conv, nn.Conv3d):
    """`M.Conv3d`: `torch.nn.Conv3d` with MegEngine's arguments and initial values."""


class ConvTranspose2d(nn.ConvTranspose2d, Module):
    """`M.ConvTranspose2d`: torch's, with MegEngine's order of arguments and initial values."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        conv_mode: str = "cross_correlation",
        compute_mode: str = "default",
        name: str | None = None,
    ) -> None:
        _check_conv_mode(conv_mode)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            device=default_device(),
        )
        self.name = name

    def reset_parameters(self) -> None:
        """Set the initial values."""
        _start(self, self.weight[:, 0].numel())


def _check_conv_mode(conv_mode: str) -> None:
    if str(conv_mode).lower() != "cross_correlation":
        raise AssertionError(f"conv_mode must be 'cross_correlation', got {conv_mode!r}.")


class _BatchNorm(Module):
    """Arguments of batch norms: `momentum` is the weight of the old statistics, torch's 1 − it."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        track_running_stats: bool = True,
        freeze: bool = False,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        super(Module, self).__init__(
            num_features,
            eps,
            1.0 - momentum,
            affine,
            track_running_stats,
            device=default_device(),
            **arguments,
        )
        self.name, self.freeze = name, freeze
        if freeze:
            self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Any:
        """Set the mode; a frozen norm stays in evaluation mode."""
        return super().train(mode and not getattr(self, "freeze", False))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`M.BatchNorm1d`: `torch.nn.BatchNorm1d` with MegEngine's momentum and `freeze`."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`M.BatchNorm2d`: `torch.nn.BatchNorm2d` with MegEngine's momentum and `freeze`.

    >>> round(BatchNorm2d(4, momentum=0.75).momentum, 4)
    0.25
    """


class SyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """`M.SyncBatchNorm`: `torch.nn.SyncBatchNorm` with MegEngine's momentum and `freeze`."""


class GroupNorm(nn.GroupNorm, Module):
    """`M.GroupNorm`."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, default_device())
        self.name = name


class InstanceNorm(GroupNorm):
    """`M.InstanceNorm`: a group norm with one channel in each group."""

    def __init__(
        self, num_channels: int, eps: float = 1e-5, affine: bool = True, name: str | None = None
    ) -> None:
        super().__init__(num_channels, num_channels, eps, affine, name)


class LayerNorm(nn.LayerNorm, Module):
    """`M.LayerNorm`."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        affine: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, affine, device=default_device())
        self.name = name


class Embedding(nn.Embedding, Module):
    """`M.Embedding`: indices of any integer dtype."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float | None = None,
        initial_weight: Any = None,
        freeze: bool = False,
        name: str | None = None,
    ) -> None:
        if (padding_idx, max_norm, norm_type) != (None, None, None):
            raise ValueError(
                "M.Embedding does not support padding_idx, max_norm or norm_type, as in MegEngine."
                " Use torch.nn.Embedding."
            )
        super().__init__(num_embeddings, embedding_dim, device=default_device())
        self.name = name
        if initial_weight is not None:
            self.load_state_dict({"weight": initial_weight})
        self.requires_grad_(not freeze)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows at the indices."""
        return super().forward(input.long())


class Dropout(nn.Dropout, Module):
    """`M.Dropout(drop_prob)`."""

    def __init__(self, drop_prob: float = 0.0, name: str | None = None) -> None:
        super().__init__(drop_prob)
        self.name = name


class AvgPool2d(nn.AvgPool2d, Module):
    """`M.AvgPool2d`: padding counts only with mode "average"."""

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        mode: str = "average_count_exclude_padding",
        name: str | None = None,
    ) -> None:
        super().__init__(
            kernel_size,
            stride,
            padding,
            count_include_pad=counts_padding(mode),
        )
        self.name = name


class Softmax(nn.Softmax, Module):
    """`M.Softmax(axis)`: without an axis over axis 1, of 1 or 3 dimensions over axis 0."""

    def __init__(self, axis: int | None = None, name: str | None = None) -> None:
        super().__init__(axis)
        self.name = name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the softmax."""
        return torch.softmax(input, softmax_axis(input.dim()) if self.dim is None else self.dim)


class PReLU(nn.PReLU, Module):
    """`M.PReLU(num_parameters, init)`."""

    def __init__(
        self, num_parameters: int = 1, init: float = 0.25, name: str | None = None
    ) -> None:
        super().__init__(num_parameters, init, default_device())
        self.name = name


class Concat(Module):
    """`M.Concat`: join tensors along an axis."""

    def forward(self, inps: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
        """Return the tensors joined."""
        return torch.cat(list(inps), axis)


class _Named(Module):
    """A layer of torch that also accepts `name=`."""

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        super(Module, self).__init__(*args, **kwargs)
        self.name = name


class AdaptiveAvgPool2d(_Named, nn.AdaptiveAvgPool2d):
    """`M.AdaptiveAvgPool2d(oshp)`."""

    def __init__(self, oshp: Size, name: str | None = None) -> None:
        super().__init__(oshp, name=name)


class AdaptiveMaxPool2d(_Named, nn.AdaptiveMaxPool2d):
    """`M.AdaptiveMaxPool2d(oshp)`."""

    def __init__(self, oshp: Size, name: str | None = None) -> None:
        super().__init__(oshp, name=name)


class GELU(_Named, nn.GELU):
    """`M.GELU`."""


class Identity(_Named, nn.Identity):
    """`M.Identity`."""


class LeakyReLU(_Named, nn.LeakyReLU):
    """`M.LeakyReLU(negative_slope)`."""


class MaxPool2d(_Named, nn.MaxPool2d):
    """`M.MaxPool2d(kernel_size, stride, padding)`."""


class PixelShuffle(_Named, nn.PixelShuffle):
    """`M.PixelShuffle(upscale_factor)`."""


class ReLU(_Named, nn.ReLU):
    """`M.ReLU`."""


class Sequential(_Named, nn.Sequential):
    """`M.Sequential`: layers in order, or an OrderedDict of them."""


class SiLU(_Named, nn.SiLU):
    """`M.SiLU`."""


class Sigmoid(_Named, nn.Sigmoid):
    """`M.Sigmoid`."""
