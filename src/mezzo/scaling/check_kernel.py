"""The Triton side of `kernels.py`: imported only where it is used, since Triton is optional."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit  # type: ignore[untyped-decorator]
def _finish(values, destination, factor, mask, dtype: tl.constexpr, write: tl.constexpr, summed: tl.constexpr, masked: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Multiply, write back, and tell whether a result is not finite and what the squares of all add up to."""
    wide = tl.float64 if dtype == tl.float64 else tl.float32
    if write:
        # The result is judged, not the input: a factor above 1 can carry a finite float16 past its largest value.
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
@triton.jit(do_not_specialize=["addresses", "sizes", "chunks", "factor", "found", "flags", "squares"])  # type: ignore[untyped-decorator]
def check_kernel(  # type: ignore[no-untyped-def] # noqa: ANN201
    addresses,  # noqa: ANN001 - int64 [tensors]
    sizes,  # noqa: ANN001 - int64 [tensors]: numbers of elements
    chunks,  # noqa: ANN001 - int32 [2, programs]: tensor, chunk of that tensor
    factor,  # noqa: ANN001 - float32; what it is divided by with `inverse`
    found,  # noqa: ANN001
    flags,  # noqa: ANN001
    squares,  # noqa: ANN001 - float32 [programs]
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
        bad, total = _finish(tl.load(base + within, mask=mask, other=0.0), base + within, scale, mask, dtype, write, summed, True)
    if summed:
        # One number a program, added up later in a fixed order: runs repeat.
        tl.store(squares + program, total)
    if bad != 0:
        # Every program that comes here writes the same value: no atomics needed.
        tl.store(found, 1.0)
        if flagged:
            tl.store(flags + tensor, 1)
