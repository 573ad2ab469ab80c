"""MXNet's pooling and resizing in torch.

MXNet's `full` convention rounds the output size up and may have windows that torch's `ceil_mode`
drops; its averages count the padding, but not what `full` adds behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo.compat.mxnet.symbol._ops import Shape, register

_AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMUM: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@register(
    "Pooling Pooling_v1",
    allowed={
        "pool_type": ("max", "avg", "sum", "lp"),
        "pooling_convention": ("valid", "full"),
        "layout": (None, "NCW", "NCHW", "NCDHW"),
    },
)
def _pooling(
    data: Tensor,
    *,
    kernel: Shape = (),
    pool_type: str = "max",
    global_pool: bool = False,
    pooling_convention: str = "valid",
    stride: Shape = (),
    pad: Shape = (),
    p_value: int | None = None,
    count_include_pad: bool | None = None,
) -> Tensor:
    power = (p_value or 2) if pool_type == "lp" else 1
    if global_pool:
        return _pool_all(data, pool_type, power)
    count = len(kernel)
    stride, pad = stride or (1,) * count, pad or (0,) * count
    # What `full` adds on the right, so that the last window fits.
    extra = (
        tuple(
            -(size + 2 * p - k) % s
            for size, p, k, s in zip(data.shape[2:], pad, kernel, stride, strict=True)
        )
        if pooling_convention == "full"
        else (0,) * count
    )
    if pool_type == "max":
        padded = _pad(data, pad, extra, float("-inf"))
        return _MAXIMUM[count](padded, kernel, stride)
    if pool_type == "avg" and not any(extra) and not any(pad):
        return _AVERAGE[count](data, kernel, stride)
    values = data.abs() ** power if pool_type == "lp" else data
    sums = _AVERAGE[count](_pad(values, pad, extra, 0.0), kernel, stride) * prod(kernel)
    if pool_type != "avg":
        return sums ** (1 / power)
    ones = torch.ones((1, 1, *data.shape[2:]), dtype=data.dtype, device=data.device)
    included = count_include_pad is not False
    counted = _pad(_pad(ones, pad, (0,) * count, float(included)), (0,) * count, extra, 0.0)
    return sums / (_AVERAGE[count](counted, kernel, stride) * prod(kernel)).clamp(min=1)


def _pool_all(data: Tensor, pool_type: str, power: int) -> Tensor:
    axes = tuple(range(2, data.dim()))
    match pool_type:
        case "max":
            return data.amax(axes, keepdim=True)
        case "avg":
            return data.mean(axes, keepdim=True)
        case "sum":
            return data.sum(axes, keepdim=True)
    return (data.abs() ** power).sum(axes, keepdim=True) ** (1 / power)


def _pad(data: Tensor, pad: Shape, extra: Shape, value: float) -> Tensor:
    # torch has the last dimension first.
    sides = [(p, p + e) for p, e in zip(reversed(pad), reversed(extra), strict=True)]
    if not any(chain.from_iterable(sides)):
        return data
    return F.pad(data, tuple(chain.from_iterable(sides)), value=value)


@register("_contrib_AdaptiveAvgPooling2D")
def _adaptive_average(data: Tensor, *, output_size: Shape = (1,)) -> Tensor:
    return F.adaptive_avg_pool2d(data, (output_size[0], output_size[-1]))


@register("UpSampling", allowed={"sample_type": ("nearest",)}, ignored="num_filter")
def _up_sampling(data: Tensor, *, scale: int) -> Tensor:
    return data.repeat_interleave(scale, 2).repeat_interleave(scale, 3)


_PAD_MODES = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}


@register("Pad pad", allowed={"mode": tuple(_PAD_MODES)})
def _pad_op(
    data: Tensor,
    *,
    mode: str,
    pad_width: Shape,
    constant_value: float = 0.0,
) -> Tensor:
    sides = [pad_width[place : place + 2] for place in range(0, len(pad_width), 2)]
    if mode == "constant":
        return F.pad(data, tuple(chain.from_iterable(reversed(sides))), value=constant_value)
    # MXNet pads batches and channels only with a constant, which torch requires too.
    return F.pad(data, tuple(chain.from_iterable(reversed(sides[2:]))), mode=_PAD_MODES[mode])
