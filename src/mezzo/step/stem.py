"""Convolutions of images with few channels, as the first of a model is, in forms for which cuDNN has fast kernels.

Tensor cores want channels in eights, and images have three. With a stride, the pixels of a block that is as large as the stride are laid side by side as channels: what
remains is a dense convolution with stride 1, for the patches of a vision transformer a plain product of matrices. In float16 there are kernels for four channels, and
cuDNN would add the fourth by itself, in both passes. Forward and the weight's gradient on an H200, in µs:

| | as it is | here |
|---|---|---|
| 16 × 16 by 16, 128 × 3 × 224², 768 channels, float16 and bfloat16 | 1152 | 98 |
| 4 × 4 by 4, 128 × 3 × 224², 96 channels, float16 | 328 | 80 |
| 3 × 3 by 2, 128 × 3 × 224², 32 channels, float16 | 320 | 178 |
| 7 × 7 by 2, 128 × 3 × 224², 64 channels, float16 | 570 | 422 |
| 7 × 7 by 2, 128 × 3 × 224², 64 channels, bfloat16 | 1453 | 796 |
| 3 × 3 by 1, 64 × 3 × 224², 64 channels, float16 | 763 | 620 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

Pair: TypeAlias = tuple[int, int]
Form: TypeAlias = Callable[[Any, Any, Any, tuple[Sequence[int], Sequence[int]], Pair, Pair], Any]
"""Input, weight and bias, the shapes of the first two, stride and padding: tensors, or what stands for them in a graph."""

_FEW = 4
"""Channels that are few, and those that kernels for few channels in float16 have."""
_TOGETHER = 8
"""Channels that blocks have come in multiples of it."""
_BLOCKS = {torch.float16: 3, torch.bfloat16: 4}
"""How many blocks a kernel may reach over in either direction: 7 × 7 by 2 is slower on them in float16, for which cuDNN has kernels of its own."""


def form_of(weight: Sequence[int], stride: Pair, dtype: torch.dtype) -> Form | None:
    """The fastest known form for a weight of this shape; None is as it is. A kernel that is smaller than its stride does not look at all of a block.

    >>> [form and form.__name__ for form in (form_of((64, 3, 4, 4), (4, 4), torch.bfloat16), form_of((64, 3, 7, 7), (2, 2), torch.float16))]
    ['in_blocks', 'with_four']
    >>> form_of((64, 3, 3, 3), (1, 1), torch.bfloat16), form_of((64, 16, 4, 4), (4, 4), torch.float16)
    (None, None)
    """
    _, channels, *kernel = weight
    if channels > _FEW or dtype not in _BLOCKS:
        return None
    if stride != (1, 1) and all(step <= taps <= _BLOCKS[dtype] * step for taps, step in zip(kernel, stride, strict=True)):
        return in_blocks
    return with_four if dtype is torch.float16 and channels < _FEW else None


def in_blocks(x: Any, weight: Any, bias: Any, shapes: tuple[Sequence[int], Sequence[int]], stride: Pair, padding: Pair) -> Any:
    """With the pixels of a block as channels. Blocks reach over the edge of a kernel whose size is no multiple of the stride; weights there are 0.

    >>> x, weight = torch.randn(2, 3, 15, 16), torch.randn(8, 3, 7, 5)
    >>> out = in_blocks(x, weight, None, (x.shape, weight.shape), (2, 3), (3, 1))
    >>> torch.allclose(out, F.conv2d(x, weight, None, (2, 3), (3, 1)), atol=1e-4)
    True
    """
    (_, channels, *sizes), (_, _, *kernel) = shapes
    window, blocks, beyond, spare = [], [], [], []
    for size, taps, step, pad in zip(sizes, kernel, stride, padding, strict=True):
        window.append(-(-taps // step))
        blocks.append((size + 2 * pad - taps) // step + window[-1])
        beyond.append(blocks[-1] * step - pad - size)
        spare.append(window[-1] * step - taps)
    images = _blocks(F.pad(x, (padding[1], beyond[1], padding[0], beyond[0])), channels, blocks, stride)
    return F.conv2d(images, _blocks(F.pad(weight, (0, spare[1], 0, spare[0])), channels, window, stride), bias)


def with_four(x: Any, weight: Any, bias: Any, shapes: tuple[Sequence[int], Sequence[int]], stride: Pair, padding: Pair) -> Any:
    """With zeros for the channels that are missing."""
    spare = (0, 0, 0, 0, 0, _FEW - shapes[1][1])
    return F.conv2d(F.pad(x, spare), F.pad(weight, spare), bias, stride, padding)


def _blocks(tensor: Any, channels: int, counts: Sequence[int], stride: Pair) -> Any:
    """Pixels of a block as channels, in memory innermost as channels are in `channels_last`."""
    (rows, columns), (height, width) = counts, stride
    inside = height * width * channels
    apart = tensor.reshape(-1, channels, rows, height, columns, width).permute(0, 2, 4, 3, 5, 1)
    return F.pad(apart.reshape(-1, rows, columns, inside), (0, -inside % _TOGETHER)).permute(0, 3, 1, 2)
