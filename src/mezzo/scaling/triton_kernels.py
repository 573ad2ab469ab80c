"""Triton kernels: check and unscale gradients, update the loss scale."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _finish(
    values,
    destination,
    factor,
    mask,
    dtype: tl.constexpr,
    write: tl.constexpr,
    summed: tl.constexpr,
    counted: tl.constexpr,
    masked: tl.constexpr,
):
    """Multiply and write back; return what is not finite, the sum of squares, and what is small.

    That is, if `counted` is set, how many results are not finite, else whether one is; and how many
    values are below the smallest normal number before they are multiplied, plus 2^16 times how many
    of them are zero. A chunk has fewer than 2^16 values.
    """
    wide = tl.float64 if dtype == tl.float64 else tl.float32
    small = 0
    if counted:
        magnitude = tl.abs(values if dtype == tl.float64 else values.to(tl.float32))
        smallest_normal = (
            6.103515625e-05
            if dtype == tl.float16
            else 2.2250738585072014e-308
            if dtype == tl.float64
            else 1.1754943508222875e-38
        )
        is_small, is_zero = magnitude < smallest_normal, magnitude == 0.0
        if masked:
            is_small, is_zero = is_small & mask, is_zero & mask
        small = tl.sum(is_small.to(tl.int32) + (is_zero.to(tl.int32) << 16), axis=0)
    if write:
        # Check the result, not the input: a factor above 1 can make a finite float16 overflow.
        values = tl.where(factor == 1.0, values, (values.to(wide) * factor.to(wide)).to(dtype))
        if masked:
            tl.store(destination, values, mask=mask)
        else:
            tl.store(destination, values)
    # NaN compares false too. float32 represents every 16-bit value.
    finite = tl.abs(values if dtype == tl.float64 else values.to(tl.float32)) < float("inf")
    if counted:
        nonfinite = tl.sum((finite == 0).to(tl.int32), axis=0)
    else:
        nonfinite = tl.max((finite == 0).to(tl.int32), axis=0)
    total = 0.0
    if summed:
        unscaled = values.to(wide) if write else values.to(wide) * factor.to(wide)
        total = tl.sum(unscaled * unscaled, axis=0).to(tl.float32)
    return nonfinite, total, small


@triton.jit
def _count(counts, slot, nonfinite, small, size, is_first):
    """Add the counts of one chunk to the row of its gradient; see `GradientCounts`."""
    row = counts + slot.to(tl.int64) * 4
    if nonfinite != 0:
        tl.atomic_add(row, nonfinite.to(tl.int64), sem="relaxed")
        tl.atomic_max(counts, (2147483647 - slot).to(tl.int64), sem="relaxed")
    if small != 0:
        tl.atomic_add(row + 1, (small & 65535).to(tl.int64), sem="relaxed")
        tl.atomic_add(row + 2, (small >> 16).to(tl.int64), sem="relaxed")
    if is_first:
        tl.atomic_add(row + 3, size, sem="relaxed")


# Not specialized, so that one compiled kernel takes any addresses and counts.
@triton.jit(
    do_not_specialize=[
        "addresses",
        "sizes",
        "chunks",
        "factor",
        "found_inf",
        "flags",
        "squares",
        "counts",
        "first_slot",
    ]
)
def check_kernel(
    addresses,
    sizes,
    chunks,
    factor,
    found_inf,
    flags,
    squares,
    counts,  # int64 [slots, 4]: see `GradientCounts`
    first_slot,  # of the first gradient
    dtype: tl.constexpr,
    chunk: tl.constexpr,
    write: tl.constexpr,
    flagged: tl.constexpr,
    summed: tl.constexpr,
    inverse: tl.constexpr,
    counted: tl.constexpr,
):
    """Check one chunk of one tensor per program, and multiply it if `write` is set."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + program)
    # 64 bits: a tensor may have more than 2^31 elements.
    start = tl.load(chunks + tl.num_programs(0) + program).to(tl.int64) * chunk
    address = tl.load(addresses + tensor)
    left = tl.load(sizes + tensor) - start
    scale = tl.load(factor) if write or summed else 1.0
    if inverse:
        # Rounded once from float64, as `LossScale.inverse`.
        scale = (1.0 / tl.load(factor).to(tl.float64)).to(tl.float32)
    base = address.to(tl.pointer_type(dtype)) + start
    within = tl.arange(0, chunk)
    if (left >= chunk) & (address % 16 == 0):
        # Without a mask and with known alignment, loads and stores are 16 bytes wide.
        aligned = tl.multiple_of(base, 16) + within
        nonfinite, total, small = _finish(
            tl.load(aligned), aligned, scale, within, dtype, write, summed, counted, False
        )
    else:
        mask = within < left
        nonfinite, total, small = _finish(
            tl.load(base + within, mask=mask, other=0.0),
            base + within,
            scale,
            mask,
            dtype,
            write,
            summed,
            counted,
            True,
        )
    if counted:
        _count(counts, first_slot + tensor, nonfinite, small, left, start == 0)
    if summed:
        # One number per program, added up later in a fixed order: deterministic.
        tl.store(squares + program, total)
    if nonfinite != 0:
        # All programs write the same value: no atomics needed.
        tl.store(found_inf, 1.0)
        if flagged:
            tl.store(flags + tensor, 1)


# Not specialized, so that one compiled kernel takes any addresses.
@triton.jit(do_not_specialize=["counters", "tracker", "found_inf", "rule"])
def advance_kernel(
    counters,  # float32 [4]: scale, skipped steps, consecutive skips, backoff tracker
    tracker,  # int32: growth tracker
    found_inf,  # float32: 0 if the gradients were finite
    # float64 [7]: growth factor, backoff factor, floor, ceiling, growth interval, backoff interval,
    # consecutive backoff.
    rule,
    changes: tl.constexpr,
):
    """Do what `next_state` does, in float64 and rounded once."""
    skipped = tl.load(found_inf) != 0.0
    increment = skipped.to(tl.float32)
    tl.store(counters + 1, tl.load(counters + 1) + increment)
    tl.store(counters + 2, (tl.load(counters + 2) + 1.0) * increment)
    if changes:
        growth_interval, backoff_interval = tl.load(rule + 4), tl.load(rule + 5)
        consecutive = tl.load(rule + 6) != 0.0
        scale, good, skips = tl.load(counters), tl.load(tracker), tl.load(counters + 3)
        good = tl.where(skipped, 0, good + 1)
        skips = tl.where(skipped, skips + 1.0, tl.where(consecutive, 0.0, skips))
        backs_off = skipped & (backoff_interval != 0.0) & (skips >= backoff_interval)
        grows = (skipped == 0) & (growth_interval != 0.0) & (good >= growth_interval)
        changed = (
            scale.to(tl.float64)
            * tl.where(backs_off, tl.load(rule + 1), tl.where(grows, tl.load(rule), 1.0))
        ).to(tl.float32)
        # No growth past the largest float32, as in torch's kernel.
        changed = tl.where(changed < float("inf"), changed, scale)
        bounded = tl.minimum(
            tl.maximum(changed.to(tl.float64), tl.load(rule + 2)), tl.load(rule + 3)
        ).to(tl.float32)
        tl.store(counters, tl.where(backs_off | grows, bounded, scale))
        tl.store(tracker, tl.where(grows, 0, good))
        after = tl.where(consecutive, 0.0, backoff_interval - 1.0).to(tl.float32)
        tl.store(counters + 3, tl.where(backs_off, after, tl.where(grows, 0.0, skips)))
