"""Triton kernels of a step: write metrics, read inputs by pointer, pool images with channels last."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR2004


# Not specialized: a launch through the compiled kernel then fits any addresses.
@triton.jit(do_not_specialize=["board", "loss", "found", "shown"])
def metrics_kernel(
    board,  # float32 [5]: loss, whether skipped, scale, skipped steps, skipped steps in a row
    loss,
    found,  # float32
    shown,  # float32 [4]: scale, skipped steps, skipped steps in a row, and one more
    dtype: tl.constexpr,  # of the loss
    has_loss: tl.constexpr,
):
    """Write the numbers side by side."""
    lane = tl.arange(0, 8)
    values = tl.load(shown + lane - 2, mask=(lane >= 2) & (lane < 5), other=0.0)
    values = tl.where(lane == 1, tl.load(found), values)
    if has_loss:
        values = tl.where(
            lane == 0, tl.load(loss.to(tl.pointer_type(dtype))).to(tl.float32), values
        )
        tl.store(board + lane, values, mask=lane < 5)
    else:
        tl.store(board + lane, values, mask=(lane > 0) & (lane < 5))


# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


# Not specialized: a launch through the compiled kernel then fits any addresses and counts.
@triton.jit(do_not_specialize=["box", "letter", "count", "width"])
def read_record(
    box,  # int64 [1 + slots × width] of the host: letters that were done, and the letters
    letter,  # int64 [width]: addresses
    count,  # int64: letters that were done
    width,
    slots: tl.constexpr,
    block: tl.constexpr,  # at least `width`
):
    """Fetch the next letter. One program does, in one request: the host's memory is far away, and others would ask for it thousands of times."""
    lane = tl.arange(0, block)
    row = box + 1 + (tl.load(count) % slots) * width
    tl.store(letter + lane, tl.load(row + lane, mask=lane < width, other=0), mask=lane < width)


@triton.jit(do_not_specialize=["letter", "buffer", "size", "place"])
def load_input(
    letter,
    buffer,
    size,  # elements
    place,  # of the input's address in the letter
    dtype: tl.constexpr,  # of the input, which is aligned to 16 bytes as the buffer is
    held: tl.constexpr,  # of the buffer
    chunk: tl.constexpr,
):
    """Copy an input into its buffer."""
    address = tl.load(letter + place)
    # 64 bits: a tensor may have more than 2^31 bytes.
    start = tl.program_id(0).to(tl.int64) * chunk
    within = tl.arange(0, chunk)
    source = tl.multiple_of(address.to(tl.pointer_type(dtype)) + start, 16) + within
    target = tl.multiple_of(buffer + start, 16) + within
    if size - start >= chunk:
        tl.store(target, tl.load(source).to(held))
    else:
        mask = within < size - start
        tl.store(target, tl.load(source, mask=mask, other=0).to(held), mask=mask)


@triton.jit(do_not_specialize=["box", "letter", "count", "loss", "place"])
def store_loss(
    box,
    letter,
    count,
    loss,  # float32
    place,
):
    """Put the loss where the letter wants it, if it does, and note that the letter is done."""
    address = tl.load(letter + place)
    if address != 0:
        tl.store(address.to(tl.pointer_type(tl.float32)), tl.load(loss))
    # One thread stores, and what it loaded before is the old count; what others load is not used.
    done = tl.load(count) + 1
    tl.store(count, done)
    tl.store(box, done)


# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


@triton.jit
def pool_kernel(
    x,  # [images, rows, columns, channels]
    out,  # [images, out_rows, out_columns, channels]
    places,  # int8, of the same shape: where in its window each maximum was
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
    """The first of the largest values of each window; a NaN is larger than anything, and the last of several counts, as torch has it."""
    image, out_row = tl.program_id(0) // out_rows, tl.program_id(0) % out_rows
    out_column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[:, None]
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)[None, :]
    inside, known = out_column < out_columns, channel < channels
    top, left = out_row * row_stride - row_padding, out_column * column_stride - column_padding
    # Where a window has nothing but -inf its first value counts that is in the image.
    place = (
        tl.maximum(-top, 0) * kernel_columns
        + tl.maximum(-left, 0)
        + tl.zeros([block_columns, block_channels], tl.int32)
    )
    best = tl.full([block_columns, block_channels], float("-inf"), tl.float32)
    for i in tl.static_range(kernel_rows):
        row = top + i
        first = (image * rows + row).to(tl.int64) * columns * channels
        in_row = inside & (row >= 0) & (row < rows)
        for j in tl.static_range(kernel_columns):
            column = left + j
            there = in_row & (column >= 0) & (column < columns)
            value = tl.load(
                x + first + (column * channels + channel), mask=there & known, other=float("-inf")
            ).to(tl.float32)
            wins = (value > best) | (value != value)  # noqa: PLR0124 - a NaN differs from itself
            best = tl.where(wins, value, best)
            place = tl.where(wins, i * kernel_columns + j, place)
    at = tl.program_id(0).to(tl.int64) * out_columns * channels + (out_column * channels + channel)
    tl.store(out + at, best.to(out.dtype.element_ty), mask=inside & known)
    tl.store(places + at, place.to(tl.int8), mask=inside & known)


@triton.jit
def pool_backward_kernel(
    given,  # [images, out_rows, out_columns, channels]
    places,  # int8, of the same shape
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
    """What each value gets from the windows whose maximum it was, in an order that never changes.

    A program's columns are a stride apart: all are at the same places of their windows, and windows
    that have no such place are not looked at.
    """
    image, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    phase, chunk = tl.program_id(1) % column_stride, tl.program_id(1) // column_stride
    number = chunk * block_columns + tl.arange(0, block_columns)[:, None]
    column = number * column_stride + phase
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)[None, :]
    inside = (column < columns) & (channel < channels)
    last_row, last_column = (
        (row + row_padding) // row_stride,
        number + (phase + column_padding) // column_stride,
    )
    total = tl.zeros([block_columns, block_channels], tl.float32)
    for i in tl.static_range((kernel_rows + row_stride - 1) // row_stride):
        out_row, below = last_row - i, (row + row_padding) % row_stride + i * row_stride
        if (out_row >= 0) & (out_row < out_rows) & (below < kernel_rows):
            first = (image * out_rows + out_row).to(tl.int64) * out_columns * channels
            for j in tl.static_range((kernel_columns + column_stride - 1) // column_stride):
                beside = (phase + column_padding) % column_stride + j * column_stride
                if beside < kernel_columns:
                    out_column = last_column - j
                    there = inside & (out_column >= 0) & (out_column < out_columns)
                    at = first + (out_column * channels + channel)
                    place = tl.load(places + at, mask=there, other=-1).to(tl.int32)
                    gradient = tl.load(given + at, mask=there, other=0.0).to(tl.float32)
                    total += tl.where(place == below * kernel_columns + beside, gradient, 0.0)
    at = tl.program_id(0).to(tl.int64) * columns * channels + (column * channels + channel)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
