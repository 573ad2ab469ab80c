"""Triton kernels of a step: write metrics, max pooling in channels_last."""

from __future__ import annotations

import triton
import triton.language as tl


# Not specialized: the compiled kernel can then be launched with any addresses.
@triton.jit(
    do_not_specialize=[
        "memory",
        "loss",
        "flag",
        "counters",
        "rate",
        "square_sum",
        "history",
        "cursor",
        "counts",
    ]
)
def metrics_kernel(
    memory,  # float64, pinned: see `MetricIndex`
    loss,
    flag,  # float32: 1 if the step was skipped
    counters,  # float32 [4]: scale, skipped steps, consecutive skips, and one that is not copied
    rate,
    square_sum,  # float64: of the gradients
    history,  # float64, pinned: see `HistoryIndex`
    cursor,  # int64: number of the last row of the history
    counts,  # int64: see `GradientCounts`
    loss_dtype: tl.constexpr,
    rate_dtype: tl.constexpr,
    has_loss: tl.constexpr,
    has_counters: tl.constexpr,  # and a flag
    has_rate: tl.constexpr,
    has_norm: tl.constexpr,
    loss_index: tl.constexpr,
    skipped_index: tl.constexpr,
    scale_index: tl.constexpr,  # where the counters go, up to the rate
    rate_index: tl.constexpr,
    norm_index: tl.constexpr,
    has_history: tl.constexpr,
    has_counts: tl.constexpr,
    updates: tl.constexpr,
    rows: tl.constexpr,
):
    """Write the metrics of a step to pinned memory; those that are not passed keep their values.

    A row of the history has the metrics of this step only.
    """
    row_loss, row_skipped = float("nan"), 0.0 if updates else -1.0
    row_scale, row_norm = float("nan"), float("nan")
    if has_loss:
        value = tl.load(loss.to(tl.pointer_type(loss_dtype))).to(tl.float64)
        tl.store(memory + loss_index, value)
        row_loss = value
    if has_counters:
        tl.store(memory + skipped_index, tl.load(flag).to(tl.float64))
        lane = tl.arange(0, 8)
        is_counter = lane < rate_index - scale_index
        values = tl.load(counters + lane, mask=is_counter, other=0.0).to(tl.float64)
        tl.store(memory + scale_index + lane, values, mask=is_counter)
        row_skipped = tl.load(flag).to(tl.float64)
        row_scale = tl.load(counters).to(tl.float64)
    if has_rate:
        value = tl.load(rate.to(tl.pointer_type(rate_dtype))).to(tl.float64)
        tl.store(memory + rate_index, value)
    if has_norm:
        row_norm = tl.sqrt(tl.load(square_sum))
        tl.store(memory + norm_index, row_norm)
    if has_history:
        number = tl.load(cursor) + 1
        tl.store(cursor, number)
        row = history + (number - 1) % rows * 7
        tl.store(row, number.to(tl.float64))
        tl.store(row + 1, row_loss)
        tl.store(row + 2, row_skipped)
        tl.store(row + 3, row_scale)
        tl.store(row + 4, row_norm)
        if has_counts:
            tl.store(row + 5, tl.load(counts).to(tl.float64))
            tl.store(counts, 0)
        else:
            tl.store(row + 5, 0.0)
        tl.store(row + 6, 1.0 if has_loss else 0.0)


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
