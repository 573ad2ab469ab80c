"""Max pooling with channels last, as ops that compiled code calls.

The place of a maximum within its window is kept in 8 bits, and in the backward pass every value
looks at the few windows that it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mezzo._launch import device_guard

_VALUES = 1024
"""What a program writes: eight a thread. With sixteen the maxima of 128 × 64 × 112² values take
273 µs on an H200, with eight 133."""
_CHANNELS = 256
"""Of these as many channels of one pixel, or all."""


@torch.library.custom_op("mezzo::max_pool2d", mutates_args=())
def max_pool2d(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each window, and its place there."""
    # Triton is optional, and takes a while to import.
    from mezzo.step.triton_kernels import pool_kernel  # noqa: PLC0415

    out, places = _windows(x, kernel, stride, padding)
    with device_guard(x.device):
        grid, block = _grid(out)
        pool_kernel[grid](
            _last(x),
            out,
            places,
            *x.shape[2:],
            *out.shape[2:],
            x.shape[1],
            *kernel,
            *stride,
            *padding,
            *block,
        )
    return out, places


@max_pool2d.register_fake
def _windows(
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
    places: torch.Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """What the values of an image of this size get of their windows' gradients."""
    from mezzo.step.triton_kernels import pool_backward_kernel  # noqa: PLC0415 - as above

    out: torch.Tensor = _values(gradient, places, size)
    with device_guard(out.device):
        grid, block = _grid(out, stride[1])
        pool_backward_kernel[grid](
            _last(gradient),
            _last(places),
            out,
            *size,
            *places.shape[2:],
            out.shape[1],
            *kernel,
            *stride,
            *padding,
            *block,
        )
    return out


@max_pool2d_backward.register_fake
def _values(
    gradient: torch.Tensor, places: torch.Tensor, size: Sequence[int], *_: Any
) -> torch.Tensor:
    return _empty(gradient, gradient.dtype, *places.shape[:2], *size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, *ctx.window = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    (places,) = ctx.saved_tensors
    return max_pool2d_backward(gradient, places, ctx.size, *ctx.window), None, None, None


max_pool2d.register_autograd(_backward, setup_context=_keep)


def _empty(like: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _grid(out: torch.Tensor, apart: int = 1) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Programs for rows of pixels, for columns of a row and for channels, and how many columns, so far apart, and channels one has."""
    from triton import next_power_of_2  # type: ignore[import-untyped] # noqa: PLC0415 - as above

    images, channels, rows, columns = out.shape
    together = -(-columns // apart)
    per_pixel = min(_CHANNELS, next_power_of_2(channels))
    pixels = min(_VALUES // per_pixel, next_power_of_2(together))
    return (images * rows, -(-together // pixels) * apart, -(-channels // per_pixel)), (
        pixels,
        per_pixel,
    )
