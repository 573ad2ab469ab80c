"""Triton kernels of LAMB, in three launches: moments and partial norms, trust ratios, weights."""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.optim.triton_update import (
    STOCHASTIC,
    _column,
    _load,
    _random_word,
    _read_weight,
    _store,
    _write_weight,
)


@triton.jit
def _direction(value, mean, square, column):
    """Return Adam's direction plus the weight decay."""
    return mean * column[7] / (tl.sqrt_rn(square) / column[8] + column[6]) + column[2] * value


@triton.jit
def _moments(
    parameter, companion, gradients, first, second, start, remaining, offsets, mask, column,
    master_format: tl.constexpr, bfloat16: tl.constexpr, gradient_dtype: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Update the moments; return the weights and the direction."""
    value = _read_weight(
        parameter, companion, column[11], start, remaining, offsets, mask,
        master_format, bfloat16, whole,
    )  # fmt: skip
    gradient = (
        _load(gradients, start, offsets, mask, gradient_dtype, whole).to(tl.float32) * column[0]
    )
    mean = _load(first, start, offsets, mask, tl.float32, whole)
    square = _load(second, start, offsets, mask, tl.float32, whole)
    mean += column[3] * (gradient - mean)
    square = square * column[4] + column[5] * gradient * gradient
    _store(first, start, offsets, mask, mean, tl.float32, whole)
    _store(second, start, offsets, mask, square, tl.float32, whole)
    return value, tl.where(mask, _direction(value, mean, square, column), 0.0)


@triton.jit
def _apply(
    parameter, companion, first, second, sample, spacing, start, remaining, offsets, mask, column,
    seed, index,
    master_format: tl.constexpr, bfloat16: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    value = _read_weight(
        parameter, companion, column[11], start, remaining, offsets, mask,
        master_format, bfloat16, whole,
    )  # fmt: skip
    mean = _load(first, start, offsets, mask, tl.float32, whole)
    square = _load(second, start, offsets, mask, tl.float32, whole)
    # Row 1 holds the trust ratio: `trust_kernel` has overwritten a coefficient LAMB does not use.
    value -= column[9] * column[1] * _direction(value, mean, square, column)
    word = (
        _random_word(column[10], seed, index, start, offsets) if master_format == STOCHASTIC else 0
    )
    _write_weight(
        parameter, companion, sample, spacing, start, offsets, mask, value, word,
        master_format, bfloat16, whole,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "addresses",
        "gradients",
        "chunks",
        "coefficients",
        "indices",
        "found_inf",
        "partials",
        "seed",
        "count",
    ]
)
def lamb_kernel(
    addresses, gradients, chunks, coefficients, indices, found_inf, seed,
    partials,  # float32 [2, programs]: sums of squares of weights and of directions
    count,
    master_format: tl.constexpr, bfloat16: tl.constexpr, gradient_dtype: tl.constexpr,
    skippable: tl.constexpr, chunk: tl.constexpr, apply: tl.constexpr,
):  # fmt: skip
    """Update the moments of one chunk and store its partial norms, or update its weights."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tensor = tl.load(chunks + program)
    start = tl.load(chunks + programs + program).to(tl.int64) * chunk
    parameter, companion = tl.load(addresses + tensor), tl.load(addresses + count + tensor)
    first, second = tl.load(addresses + 2 * count + tensor), tl.load(addresses + 3 * count + tensor)
    remaining = tl.load(addresses + 5 * count + tensor) - start
    sample, spacing = (
        tl.load(addresses + 7 * count + tensor),
        tl.load(addresses + 8 * count + tensor),
    )
    gradient, index = tl.load(gradients + tensor), tl.load(indices + tensor)
    offsets = tl.arange(0, chunk)
    mask = offsets < remaining
    column = _column(coefficients, count, tensor)
    take_step = tl.load(found_inf) == 0.0 if skippable else True
    whole = (remaining >= chunk) & ((parameter | companion | gradient | first | second) % 16 == 0)
    if take_step:
        if apply:
            if whole:
                _apply(
                    parameter, companion, first, second, sample, spacing, start, remaining, offsets,
                    mask, column, seed, index, master_format, bfloat16, True,
                )  # fmt: skip
            else:
                _apply(
                    parameter, companion, first, second, sample, spacing, start, remaining, offsets,
                    mask, column, seed, index, master_format, bfloat16, False,
                )  # fmt: skip
        else:
            if whole:
                value, direction = _moments(
                    parameter, companion, gradient, first, second, start, remaining, offsets, mask,
                    column, master_format, bfloat16, gradient_dtype, True,
                )  # fmt: skip
            else:
                value, direction = _moments(
                    parameter, companion, gradient, first, second, start, remaining, offsets, mask,
                    column, master_format, bfloat16, gradient_dtype, False,
                )  # fmt: skip
            tl.store(partials + program, tl.sum(value * value, axis=0))
            tl.store(partials + programs + program, tl.sum(direction * direction, axis=0))


@triton.jit(do_not_specialize=["addresses", "coefficients", "partials", "count", "programs"])
def trust_kernel(
    addresses, coefficients, partials, count, programs, chunk: tl.constexpr, block: tl.constexpr
):
    """Store the trust ratio of one parameter: the norm of its weights over that of its direction.

    Partial sums are added in a fixed order, so that runs are reproducible.
    """
    tensor = tl.program_id(0)
    begin = tl.load(addresses + 6 * count + tensor)
    end = begin + (tl.load(addresses + 5 * count + tensor) + chunk - 1) // chunk
    weights, directions = tl.zeros([block], tl.float64), tl.zeros([block], tl.float64)
    at = begin
    while at < end:
        lane = at + tl.arange(0, block)
        weights += tl.load(partials + lane, mask=lane < end, other=0.0).to(tl.float64)
        directions += tl.load(partials + programs + lane, mask=lane < end, other=0.0).to(tl.float64)
        at += block
    weight, direction = tl.sqrt(tl.sum(weights, axis=0)), tl.sqrt(tl.sum(directions, axis=0))
    trust = tl.where(
        (weight > 0.0) & (direction > 0.0), weight / tl.where(direction > 0.0, direction, 1.0), 1.0
    )
    tl.store(coefficients + count + tensor, trust.to(tl.float32))
