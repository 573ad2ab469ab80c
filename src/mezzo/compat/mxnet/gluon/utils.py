"""`gluon.utils`: batches for a list of contexts, and gradient clipping."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet import nd
from mezzo.compat.mxnet._context import Context
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["clip_global_norm", "split_and_load", "split_data"]


def split_data(
    data: torch.Tensor, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[NDArray]:
    """Split a batch into slices; with `even_split=False` the last may be larger.

    >>> [part.shape[0] for part in split_data(nd.ones((5, 1)), 2, even_split=False)]
    [2, 3]
    """
    tensor = as_tensor(data)
    size = tensor.shape[batch_axis]
    if size < num_slice or (even_split and size % num_slice):
        remedy = (
            f"use a batch size that is a multiple of {num_slice}, or set even_split=False"
            if size >= num_slice
            else "use a larger batch"
        )
        raise ValueError(
            f"data with shape {tuple(tensor.shape)} cannot be evenly split into {num_slice} slices"
            f" along axis {batch_axis}: {remedy}."
        )
    step = size // num_slice
    sizes = [step] * (num_slice - 1) + [size - step * (num_slice - 1)]
    return [as_ndarray(part) for part in torch.split(tensor, sizes, batch_axis)]


def split_and_load(
    data: Any, ctx_list: Sequence[Context], batch_axis: int = 0, even_split: bool = True
) -> list[NDArray]:
    """Split a batch and copy one slice to each context."""
    if isinstance(ctx_list, Context):
        raise TypeError(
            f"ctx_list should be a list of contexts, got {ctx_list}. Pass [{ctx_list}]."
        )
    array = as_ndarray(data) if isinstance(data, torch.Tensor) else nd.array(data, ctx_list[0])
    slices = (
        [array] if len(ctx_list) == 1 else split_data(array, len(ctx_list), batch_axis, even_split)
    )
    return [part.as_in_context(ctx) for part, ctx in zip(slices, ctx_list, strict=True)]


def clip_global_norm(
    arrays: Sequence[torch.Tensor], max_norm: float, check_isfinite: bool = True
) -> float | NDArray:
    """Scale arrays in place so that their norm is at most `max_norm`; return the norm.

    With `check_isfinite` the norm is a number, which synchronizes, and a non-finite one warns;
    otherwise it is an array.
    """
    if not arrays:
        raise ValueError("clip_global_norm got an empty list of arrays.")
    tensors = [as_tensor(array).detach() for array in arrays]
    norm = torch.nn.utils.get_total_norm(tensors)
    scale = (max_norm / (norm + 1e-8)).clamp(max=1.0)
    for tensor in tensors:
        tensor.mul_(scale.to(tensor.device))
    if not check_isfinite:
        return as_ndarray(norm.reshape(1))
    if not torch.isfinite(norm):
        warnings.warn("nan or inf is detected. Clipping results will be undefined.", stacklevel=2)
    return float(norm)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
