"""`convert_tensor_format` and `convert_module_format`: channels last, in which convolutions run on tensor cores without transposing."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: images and volumes."""


def convert_tensor_format(x: torch.Tensor, inplace: bool = True) -> torch.Tensor:  # noqa: FBT001, FBT002 - MegEngine's call shape
    """A tensor with its channels last, itself where it is converted in place. What has neither 4 nor 5 dimensions is left alone.

    >>> convert_tensor_format(torch.ones(1, 3, 2, 2)).is_contiguous(memory_format=torch.channels_last)
    True
    """
    layout = _FORMATS.get(x.dim())
    if layout is None:
        return x
    if not inplace:
        return x.contiguous(memory_format=layout)
    x.data = x.data.contiguous(memory_format=layout)
    return x


def convert_module_format(module: ModuleT, inplace: bool = True) -> ModuleT:  # noqa: FBT001, FBT002 - MegEngine's call shape
    """A module whose parameters and buffers have their channels last; a copy unless it is converted in place.

    >>> convert_module_format(nn.Conv2d(3, 8, 3)).weight.is_contiguous(memory_format=torch.channels_last)
    True
    """
    converted = module if inplace else copy.deepcopy(module)
    for one in (*converted.parameters(), *converted.buffers()):
        convert_tensor_format(one)
    return converted
