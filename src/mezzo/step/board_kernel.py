"""The Triton side of `told.py`: the numbers of a step in one store, from the device straight into the host's memory."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR2004


# Not specialized: a launch through the compiled kernel then fits any addresses.
@triton.jit(do_not_specialize=["board", "loss", "found", "shown"])
def board_kernel(
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
        values = tl.where(lane == 0, tl.load(loss.to(tl.pointer_type(dtype))).to(tl.float32), values)
        tl.store(board + lane, values, mask=lane < 5)
    else:
        tl.store(board + lane, values, mask=(lane > 0) & (lane < 5))
