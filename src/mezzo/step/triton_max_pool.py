"""Triton kernels of max pooling in channels_last, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_kernel(
    x,  # [images, rows, columns, channels]
    out,  # [images, out_rows, out_columns, channels]
    positions,  # int8, of the same shape: where in its window each maximum is
    rows,
    columns,
    out_rows,
    out_columns,
    channels,
    kernel_rows: tl.constexpr,
    kernel_columns: tl.constexpr,
    row_stride: tl.constexpr,
    column_stride: tl.constexpr,
    row_padding: tl.constexpr,
    column_padding: tl.constexpr,
    block_columns: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Compute the maximum of each window and its position, as torch does.

    Of equal values the first counts. A NaN is larger than anything; of several the last counts.
    """
    image, out_row = tl.program_id(0) // out_rows, tl.program_id(0) % out_rows
    out_column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[:, None]
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)[None, :]
    in_image, in_channels = out_column < out_columns, channel < channels
    top, left = out_row * row_stride - row_padding, out_column * column_stride - column_padding
    # In a window of nothing but -inf, the first value inside the image counts.
    position = (
        tl.maximum(-top, 0) * kernel_columns
        + tl.maximum(-left, 0)
        + tl.zeros([block_columns, block_channels], tl.int32)
    )
    best = tl.full([block_columns, block_channels], float("-inf"), tl.float32)
    for i in tl.static_range(kernel_rows):
        row = top + i
        first = (image * rows + row).to(tl.int64) * columns * channels
        in_row = in_image & (row >= 0) & (row < rows)
        for j in tl.static_range(kernel_columns):
            column = left + j
            valid = in_row & (column >= 0) & (column < columns)
            value = tl.load(
                x + first + (column * channels + channel),
                mask=valid & in_channels,
                other=float("-inf"),
            ).to(tl.float32)
            wins = (value > best) | (value != value)
            best = tl.where(wins, value, best)
            position = tl.where(wins, i * kernel_columns + j, position)
    offset = tl.program_id(0).to(tl.int64) * out_columns * channels + (
        out_column * channels + channel
    )
    tl.store(out + offset, best.to(out.dtype.element_ty), mask=in_image & in_channels)
    tl.store(positions + offset, position.to(tl.int8), mask=in_image & in_channels)


@triton.jit
def pool_backward_kernel(
    out_gradient,  # [images, out_rows, out_columns, channels]
    positions,  # int8, of the same shape
    out,  # [images, rows, columns, channels]
    rows,
    columns,
    out_rows,
    out_columns,
    channels,
    kernel_rows: tl.constexpr,
    kernel_columns: tl.constexpr,
    row_stride: tl.constexpr,
    column_stride: tl.constexpr,
    row_padding: tl.constexpr,
    column_padding: tl.constexpr,
    block_columns: tl.constexpr,
    block_channels: tl.constexpr,
):
    """Add the gradients of the windows whose maximum each value is, in a fixed order.

    A program's columns are a stride apart: all have the same positions in their windows, and
    windows without such a position are not read.
    """
    image, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    phase, chunk = tl.program_id(1) % column_stride, tl.program_id(1) // column_stride
    number = chunk * block_columns + tl.arange(0, block_columns)[:, None]
    column = number * column_stride + phase
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)[None, :]
    inside = (column < columns) & (channel < channels)
    last_row = (row + row_padding) // row_stride
    last_column = number + (phase + column_padding) // column_stride
    total = tl.zeros([block_columns, block_channels], tl.float32)
    for i in tl.static_range((kernel_rows + row_stride - 1) // row_stride):
        out_row = last_row - i
        window_row = (row + row_padding) % row_stride + i * row_stride
        if (out_row >= 0) & (out_row < out_rows) & (window_row < kernel_rows):
            first = (image * out_rows + out_row).to(tl.int64) * out_columns * channels
            for j in tl.static_range((kernel_columns + column_stride - 1) // column_stride):
                window_column = (phase + column_padding) % column_stride + j * column_stride
                if window_column < kernel_columns:
                    out_column = last_column - j
                    valid = inside & (out_column >= 0) & (out_column < out_columns)
                    offset = first + (out_column * channels + channel)
                    position = tl.load(positions + offset, mask=valid, other=-1).to(tl.int32)
                    gradient = tl.load(out_gradient + offset, mask=valid, other=0.0).to(tl.float32)
                    is_maximum = position == window_row * kernel_columns + window_column
                    total += tl.where(is_maximum, gradient, 0.0)
    offset = tl.program_id(0).to(tl.int64) * columns * channels + (column * channels + channel)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
