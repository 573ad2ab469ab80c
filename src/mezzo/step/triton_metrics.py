"""Triton kernel that writes the metrics of a step."""

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
