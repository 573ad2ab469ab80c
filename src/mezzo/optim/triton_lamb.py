"""LAMB in Triton: its step is as long as the ratio of two norms says, so that moments come first, then the norms, then the weights."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from mezzo.optim.triton_update import (
    STOCHASTIC,
    _column,
    _load,
    _random_word,
    _read_weight,
    _store,
    _write_weight,
)

# mypy and ruff: as in update_kernels.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN201


@triton.jit
def _direction(value, mean, square, column):
    """Adam's direction with the weight decay."""
    return mean * column[7] / (tl.sqrt_rn(square) / column[8] + column[6]) + column[2] * value


@triton.jit
def _moments(
    parameter, beside, gradients, first, second, start, left, within, mask, column,
    kind: tl.constexpr, bfloat16: tl.constexpr, gradient_dtype: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Update the moments; give the weights and the direction."""
    value = _read_weight(
        parameter, beside, column[11], start, left, within, mask, kind, bfloat16, whole
    )
    gradient = (
        _load(gradients, start, within, mask, gradient_dtype, whole).to(tl.float32) * column[0]
    )
    mean = _load(first, start, within, mask, tl.float32, whole)
    square = _load(second, start, within, mask, tl.float32, whole)
    mean += column[3] * (gradient - mean)
    square = square * column[4] + column[5] * gradient * gradient
    _store(first, start, within, mask, mean, tl.float32, whole)
    _store(second, start, within, mask, square, tl.float32, whole)
    return value, tl.where(mask, _direction(value, mean, square, column), 0.0)


@triton.jit
def _apply(
    parameter, beside, first, second, sample, spacing, start, left, within, mask, column, seed, place,
    kind: tl.constexpr, bfloat16: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    value = _read_weight(
        parameter, beside, column[11], start, left, within, mask, kind, bfloat16, whole
    )
    mean = _load(first, start, within, mask, tl.float32, whole)
    square = _load(second, start, within, mask, tl.float32, whole)
    # The trust ratio took the place of a coefficient that LAMB does not use.
    value -= column[9] * column[1] * _direction(value, mean, square, column)
    word = _random_word(column[10], seed, place, start, within) if kind == STOCHASTIC else 0
    _write_weight(
        parameter, beside, sample, spacing, start, within, mask, value, word, kind, bfloat16, whole
    )


@triton.jit(
    do_not_specialize=[
        "addresses",
        "gradients",
        "chunks",
        "coefficients",
        "places",
        "found",
        "partials",
        "seed",
        "count",
    ]
)
def lamb_kernel(
    addresses, gradients, chunks, coefficients, places, found, seed,
    partials,  # float32 [2, programs]: sums of squares of weights and of directions
    count,
    kind: tl.constexpr, bfloat16: tl.constexpr, gradient_dtype: tl.constexpr, skippable: tl.constexpr, chunk: tl.constexpr, apply: tl.constexpr,
):  # fmt: skip
    """One chunk of one parameter: its moments and its part of the norms, or its weights."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tensor = tl.load(chunks + program)
    start = tl.load(chunks + programs + program).to(tl.int64) * chunk
    parameter, beside = tl.load(addresses + tensor), tl.load(addresses + count + tensor)
    first, second = tl.load(addresses + 2 * count + tensor), tl.load(addresses + 3 * count + tensor)
    left = tl.load(addresses + 5 * count + tensor) - start
    sample, spacing = (
        tl.load(addresses + 7 * count + tensor),
        tl.load(addresses + 8 * count + tensor),
    )
    gradient, place = tl.load(gradients + tensor), tl.load(places + tensor)
    within = tl.arange(0, chunk)
    mask = within < left
    column = _column(coefficients, count, tensor)
    good = tl.load(found) == 0.0 if skippable else True
    whole = (left >= chunk) & ((parameter | beside | gradient | first | second) % 16 == 0)
    if good:
        if apply:
            if whole:
                _apply(
                    parameter,
                    beside,
                    first,
                    second,
                    sample,
                    spacing,
                    start,
                    left,
                    within,
                    mask,
                    column,
                    seed,
                    place,
                    kind,
                    bfloat16,
                    True,
                )
            else:
                _apply(
                    parameter,
                    beside,
                    first,
                    second,
                    sample,
                    spacing,
                    start,
                    left,
                    within,
                    mask,
                    column,
                    seed,
                    place,
                    kind,
                    bfloat16,
                    False,
                )
        else:
            if whole:
                value, direction = _moments(
                    parameter, beside, gradient, first, second, start, left, within, mask, column, kind, bfloat16, gradient_dtype, True
                )  # fmt: skip
            else:
                value, direction = _moments(
                    parameter, beside, gradient, first, second, start, left, within, mask, column, kind, bfloat16, gradient_dtype, False
                )  # fmt: skip
            tl.store(partials + program, tl.sum(value * value, axis=0))
            tl.store(partials + programs + program, tl.sum(direction * direction, axis=0))


@triton.jit(do_not_specialize=["addresses", "coefficients", "partials", "count", "programs"])
def trust_kernel(
    addresses, coefficients, partials, count, programs, chunk: tl.constexpr, block: tl.constexpr
):
    """The ratio of the norms of one parameter's weights and direction, added up in a fixed order, so that runs repeat."""
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
