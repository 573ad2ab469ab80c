"""Max pooling of channels_last images, as custom ops for compiled code.

The position of each maximum in its window is stored in 8 bits. In the backward pass each value
reads the few windows that contain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mezzo._launch import device_guard

_VALUES = 1024
"""Values that a Triton program writes, eight per thread. With sixteen the maxima of 128 × 64 × 112²
values take 273 µs on an H200, with eight 133."""
_CHANNELS = 256
"""Channels of one pixel among these values, at most."""


@torch.library.custom_op("mezzo::max_pool2d", mutates_args=())
def max_pool2d(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each window, and its position in the window."""
    # Imported here: Triton is optional and slow to import.
    from mezzo.step.triton_max_pool import pool_kernel  # noqa: PLC0415

    out, positions = _empty_windows(x, kernel, stride, padding)
    with device_guard(x.device):
        grid, block = _grid(out)
        pool_kernel[grid](
            _to_channels_last(x),
            out,
            positions,
            *x.shape[2:],
            *out.shape[2:],
            x.shape[1],
            *kernel,
            *stride,
            *padding,
            *block,
        )
    return out, positions


@max_pool2d.register_fake
def _empty_windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    images, channels, *sizes = x.shape
    counts = [
        (size + 2 * pad - window) // step + 1
        for size, window, step, pad in zip(sizes, kernel, stride, padding, strict=True)
    ]
    return _empty(x, x.dtype, images, channels, *counts), _empty(
        x, torch.int8, images, channels, *counts
    )


@torch.library.custom_op("mezzo::max_pool2d_backward", mutates_args=())
def max_pool2d_backward(
    gradient: torch.Tensor,
    positions: torch.Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """Return the gradient of images of this size from the gradients of their windows."""
    from mezzo.step.triton_max_pool import pool_backward_kernel  # noqa: PLC0415

    out: torch.Tensor = _empty_gradient(gradient, positions, size)
    with device_guard(out.device):
        grid, block = _grid(out, stride[1])
        pool_backward_kernel[grid](
            _to_channels_last(gradient),
            _to_channels_last(positions),
            out,
            *size,
            *positions.shape[2:],
            out.shape[1],
            *kernel,
            *stride,
            *padding,
            *block,
        )
    return out


@max_pool2d_backward.register_fake
def _empty_gradient(
    gradient: torch.Tensor, positions: torch.Tensor, size: Sequence[int], *_: Any
) -> torch.Tensor:
    return _empty(gradient, gradient.dtype, *positions.shape[:2], *size)


def _save_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, *ctx.window = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    return max_pool2d_backward(gradient, positions, ctx.size, *ctx.window), None, None, None


max_pool2d.register_autograd(_backward, setup_context=_save_for_backward)


def _empty(like: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _grid(out: torch.Tensor, column_step: int = 1) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the launch grid, and the columns and channels of a Triton program.

    The grid has rows of pixels, columns of a row and channels; the columns of a program are
    `column_step` apart.
    """
    from triton import next_power_of_2  # noqa: PLC0415

    images, channels, rows, columns = out.shape
    steps = -(-columns // column_step)
    block_channels = min(_CHANNELS, next_power_of_2(channels))
    block_columns = min(_VALUES // block_channels, next_power_of_2(steps))
    grid = (images * rows, -(-steps // block_columns) * column_step, -(-channels // block_channels))
    return grid, (block_columns, block_channels)
