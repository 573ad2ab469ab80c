"""The Triton side of `device.py`: a whole transition of the scale in one launch, where torch's kernels need up to five."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


# Not specialized: a launch through the compiled kernel then fits any addresses.
@triton.jit(do_not_specialize=["shown", "tracker", "found", "rule"])
def advance_kernel(
    shown,  # float32 [4]: scale, skipped steps, skipped steps in a row, bad steps that count
    tracker,  # int32: good steps in a row
    found,  # float32: 0, or the step was bad
    rule,  # float64 [7]: growth factor, back-off factor, floor, ceiling, growth interval, back-off every, whether bad steps count in a row only
    changes: tl.constexpr,
):
    """What `next_state` does, in float64 and rounded once."""
    bad = tl.load(found) != 0.0
    one = bad.to(tl.float32)
    tl.store(shown + 1, tl.load(shown + 1) + one)
    tl.store(shown + 2, (tl.load(shown + 2) + 1.0) * one)
    if changes:
        interval, every, consecutive = tl.load(rule + 4), tl.load(rule + 5), tl.load(rule + 6) != 0.0
        scale, good, counted = tl.load(shown), tl.load(tracker), tl.load(shown + 3)
        good = tl.where(bad, 0, good + 1)
        counted = tl.where(bad, counted + 1.0, tl.where(consecutive, 0.0, counted))
        back = bad & (every != 0.0) & (counted >= every)
        grow = (bad == 0) & (interval != 0.0) & (good >= interval)
        changed = (scale.to(tl.float64) * tl.where(back, tl.load(rule + 1), tl.where(grow, tl.load(rule), 1.0))).to(tl.float32)
        # Growth past the largest float32 is dropped, as torch's kernel drops it.
        changed = tl.where(changed < float("inf"), changed, scale)
        bounded = tl.minimum(tl.maximum(changed.to(tl.float64), tl.load(rule + 2)), tl.load(rule + 3)).to(tl.float32)
        tl.store(shown, tl.where(back | grow, bounded, scale))
        tl.store(tracker, tl.where(grow, 0, good))
        after = tl.where(consecutive, 0.0, every - 1.0).to(tl.float32)
        tl.store(shown + 3, tl.where(back, after, tl.where(grow, 0.0, counted)))
