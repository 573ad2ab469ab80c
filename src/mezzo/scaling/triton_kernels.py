"""Triton kernels: check and unscale gradients, update the loss scale."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202


@triton.jit
def _finish(
    values,
    destination,
    factor,
    mask,
    dtype: tl.constexpr,
    write: tl.constexpr,
    summed: tl.constexpr,
    masked: tl.constexpr,
):
    """Multiply, write back, and tell whether a result is not finite and what the squares of all add up to."""
    wide = tl.float64 if dtype == tl.float64 else tl.float32
    if write:
        # The result is judged, not the input: a factor above 1 can carry a finite float16 past its
        # largest value.
        values = tl.where(factor == 1.0, values, (values.to(wide) * factor.to(wide)).to(dtype))
        if masked:
            tl.store(destination, values, mask=mask)
        else:
            tl.store(destination, values)
    # NaN compares false as well. tl.float32 holds every 16-bit value.
    finite = tl.abs(values if dtype == tl.float64 else values.to(tl.float32)) < float("inf")
    bad = tl.max((finite == 0).to(tl.int32), axis=0)
    total = 0.0
    if summed:
        unscaled = values.to(wide) if write else values.to(wide) * factor.to(wide)
        total = tl.sum(unscaled * unscaled, axis=0).to(tl.float32)
    return bad, total


# Not specialized: a launch through the compiled kernel then fits any addresses and counts.
@triton.jit(
    do_not_specialize=["addresses", "sizes", "chunks", "factor", "found", "flags", "squares"]
)
def check_kernel(
    addresses,
    sizes,
    chunks,
    factor,
    found,
    flags,
    squares,
    dtype: tl.constexpr,
    chunk: tl.constexpr,
    write: tl.constexpr,
    flagged: tl.constexpr,
    summed: tl.constexpr,
    inverse: tl.constexpr,
):
    """One program looks at one chunk of one tensor."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + program)
    # 64 bits: a tensor may have more than 2^31 elements.
    start = tl.load(chunks + tl.num_programs(0) + program).to(tl.int64) * chunk
    address = tl.load(addresses + tensor)
    left = tl.load(sizes + tensor) - start
    scale = tl.load(factor) if write or summed else 1.0
    if inverse:
        # Rounded once from float64, as the scaler's own inverse.
        scale = (1.0 / tl.load(factor).to(tl.float64)).to(tl.float32)
    base = address.to(tl.pointer_type(dtype)) + start
    within = tl.arange(0, chunk)
    if (left >= chunk) & (address % 16 == 0):
        # Without a mask and with the alignment told, loads and stores are 16 bytes wide.
        aligned = tl.multiple_of(base, 16) + within
        bad, total = _finish(tl.load(aligned), aligned, scale, within, dtype, write, summed, False)
    else:
        mask = within < left
        bad, total = _finish(
            tl.load(base + within, mask=mask, other=0.0),
            base + within,
            scale,
            mask,
            dtype,
            write,
            summed,
            True,
        )
    if summed:
        # One number a program, added up later in a fixed order: runs repeat.
        tl.store(squares + program, total)
    if bad != 0:
        # Every program that comes here writes the same value: no atomics needed.
        tl.store(found, 1.0)
        if flagged:
            tl.store(flags + tensor, 1)


# Not specialized: a launch through the compiled kernel then fits any addresses.
@triton.jit(do_not_specialize=["shown", "tracker", "found", "rule"])
def advance_kernel(
    shown,  # float32 [4]: scale, skipped steps, skipped steps in a row, bad steps that count
    tracker,  # int32: good steps in a row
    found,  # float32: 0, or the step was bad
    # Float64 [7]: growth factor, back-off factor, floor, ceiling, growth interval, back-off every,
    # whether bad steps count in a row only.
    rule,
    changes: tl.constexpr,
):
    """What `next_state` does, in float64 and rounded once."""
    bad = tl.load(found) != 0.0
    one = bad.to(tl.float32)
    tl.store(shown + 1, tl.load(shown + 1) + one)
    tl.store(shown + 2, (tl.load(shown + 2) + 1.0) * one)
    if changes:
        interval, every, consecutive = (
            tl.load(rule + 4),
            tl.load(rule + 5),
            tl.load(rule + 6) != 0.0,
        )
        scale, good, counted = tl.load(shown), tl.load(tracker), tl.load(shown + 3)
        good = tl.where(bad, 0, good + 1)
        counted = tl.where(bad, counted + 1.0, tl.where(consecutive, 0.0, counted))
        back = bad & (every != 0.0) & (counted >= every)
        grow = (bad == 0) & (interval != 0.0) & (good >= interval)
        changed = (
            scale.to(tl.float64)
            * tl.where(back, tl.load(rule + 1), tl.where(grow, tl.load(rule), 1.0))
        ).to(tl.float32)
        # Growth past the largest float32 is dropped, as torch's kernel drops it.
        changed = tl.where(changed < float("inf"), changed, scale)
        bounded = tl.minimum(
            tl.maximum(changed.to(tl.float64), tl.load(rule + 2)), tl.load(rule + 3)
        ).to(tl.float32)
        tl.store(shown, tl.where(back | grow, bounded, scale))
        tl.store(tracker, tl.where(grow, 0, good))
        after = tl.where(consecutive, 0.0, every - 1.0).to(tl.float32)
        tl.store(shown + 3, tl.where(back, after, tl.where(grow, 0.0, counted)))
