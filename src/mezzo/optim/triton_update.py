"""Triton kernel of the fused step. Triton is optional: `fused_launch.py` imports this at first use.

A launch covers many parameters of one dtype, master format and gradient dtype. A program updates
one chunk of one parameter. It reads tables: addresses that are constant from step to step,
addresses of gradients, and the coefficients that `triton_coefficients.py` has just computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mezzo.optim.triton_coefficients import ADAGRAD, ADAM, LION, SGD

PLAIN, FLOAT32, SPLIT, KAHAN, STOCHASTIC, NONE = (tl.constexpr(code) for code in range(6))
"""PLAIN is a float32 parameter, the others are the master formats of 16-bit parameters."""

HEADER: tl.constexpr = tl.constexpr(32)
"""Elements of a chunk that are compared with their rounded float32 master, to notice that other
code wrote the parameter. 32 are one memory sector."""


# -- 16-bit numbers --------------------------------------------------------------------------------
# As bits, because Triton's interpreter truncates where a GPU rounds.


@triton.jit
def _widen(bits, bfloat16: tl.constexpr):
    """Return the float32 value of 16 bits."""
    if bfloat16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _round(value, bfloat16: tl.constexpr):
    """Return the bits of the nearest 16-bit number, ties to even."""
    if bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, nearest, 0x7FC0).to(tl.int16)
    return value.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _round_stochastically(value, word, bfloat16: tl.constexpr):
    """Return the bits of a neighbour, as `master_formats.round_stochastically` chooses it."""
    bits = value.to(tl.int32, bitcast=True)
    if bfloat16:
        drawn = ((bits + (word & 0xFFFF)) >> 16).to(tl.int16)
    else:
        part = word & 0x1FFF
        drawn = ((bits + part) & ~0x1FFF).to(tl.float32, bitcast=True)
        steps = tl.floor(value * 16777216.0 + part.to(tl.float32) * 0.0001220703125)
        drawn = (
            tl.where(tl.abs(value) < 6.103515625e-05, steps * 5.9604644775390625e-08, drawn)
            .to(tl.float16)
            .to(tl.int16, bitcast=True)
        )
    return tl.where(tl.abs(value) < float("inf"), drawn, _round(value, bfloat16))


# -- reading and writing weights -------------------------------------------------------------------


@triton.jit
def _at(address, start, dtype: tl.constexpr, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype)) + start
    # With this hint Triton loads and stores 16 bytes at a time.
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def _load(address, start, offsets, mask, dtype: tl.constexpr, whole: tl.constexpr):
    if whole:
        return tl.load(_at(address, start, dtype, True) + offsets)
    return tl.load(_at(address, start, dtype, False) + offsets, mask=mask, other=0)


@triton.jit
def _store(address, start, offsets, mask, value, dtype: tl.constexpr, whole: tl.constexpr):
    if whole:
        tl.store(_at(address, start, dtype, True) + offsets, value)
    else:
        tl.store(_at(address, start, dtype, False) + offsets, value, mask=mask)


@triton.jit
def _read_weight(
    parameter, companion, matches, start, remaining, offsets, mask,
    master_format: tl.constexpr, bfloat16: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Return float32 weights. `matches` is 0 if the companion is for an overwritten value."""
    if master_format == PLAIN:
        return _load(parameter, start, offsets, mask, tl.float32, whole)
    if master_format == FLOAT32:
        value = _load(companion, start, offsets, mask, tl.float32, whole)
        # If other code writes a whole parameter past torch's version counter (`p.data.copy_`), the
        # first elements of each chunk show it.
        head = tl.arange(0, HEADER)
        inside = head < remaining
        first_bits = tl.load(_at(parameter, start, tl.int16, False) + head, mask=inside, other=0)
        master = tl.load(_at(companion, start, tl.float32, False) + head, mask=inside, other=0.0)
        if tl.max((first_bits != _round(master, bfloat16)).to(tl.int32), axis=0) != 0:
            bits = _load(parameter, start, offsets, mask, tl.int16, whole)
            value = tl.where(bits == _round(value, bfloat16), value, _widen(bits, bfloat16))
        return value
    bits = _load(parameter, start, offsets, mask, tl.int16, whole)
    if master_format == SPLIT:
        remainder = _load(companion, start, offsets, mask, tl.int16, whole).to(tl.int32)
        remainder *= matches.to(tl.int32)
        # Zero has no negative remainder, see `master_formats.Split`.
        remainder = tl.where((bits & 0x7FFF) == 0, tl.maximum(remainder, 0), remainder)
        return ((bits.to(tl.int32) << 16) + remainder).to(tl.float32, bitcast=True)
    value = _widen(bits, bfloat16)
    if master_format == KAHAN:
        lost = _widen(_load(companion, start, offsets, mask, tl.int16, whole), bfloat16) * matches
        # A compensation that is too large for the parameter is that of an overwritten value.
        value = tl.where(_round(value + lost * 0.5, bfloat16) == bits, value + lost, value)
    return value


@triton.jit
def _store_sample(sample, spacing, start, offsets, mask, bits):
    """Store the sampled elements of a block; most blocks of a large parameter have none."""
    # Blocks start at multiples of their size.
    if ((start >> spacing) << spacing) == start:
        at = start + offsets
        tl.store(
            sample.to(tl.pointer_type(tl.int16)) + (at >> spacing),
            bits,
            mask=mask & (((at >> spacing) << spacing) == at),
        )


@triton.jit
def _write_weight(
    parameter, companion, sample, spacing, start, offsets, mask, value, word,
    master_format: tl.constexpr, bfloat16: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Store the parameter, its companion and its sample."""
    if master_format == PLAIN:
        _store(parameter, start, offsets, mask, value, tl.float32, whole)
    elif master_format == SPLIT:
        # A GPU's NaN has every bit set and would wrap around to zero.
        bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        _store(parameter, start, offsets, mask, upper.to(tl.int16), tl.int16, whole)
        _store_sample(sample, spacing, start, offsets, mask, upper.to(tl.int16))
        _store(
            companion, start, offsets, mask, (bits - (upper << 16)).to(tl.int16), tl.int16, whole
        )
    elif master_format == STOCHASTIC:
        bits = _round_stochastically(value, word, bfloat16)
        _store(parameter, start, offsets, mask, bits, tl.int16, whole)
    else:
        bits = _round(value, bfloat16)
        _store(parameter, start, offsets, mask, bits, tl.int16, whole)
        if master_format == FLOAT32:
            _store(companion, start, offsets, mask, value, tl.float32, whole)
        if master_format == KAHAN:
            error = _round(value - _widen(bits, bfloat16), bfloat16)
            _store(companion, start, offsets, mask, error, tl.int16, whole)
            _store_sample(sample, spacing, start, offsets, mask, bits)


# -- updating --------------------------------------------------------------------------------------


@triton.jit
def _column(coefficients, count, tensor):
    """Load the coefficients of one parameter. The compiler drops those that are not used."""
    at = coefficients + tensor
    return (
        tl.load(at), tl.load(at + count), tl.load(at + 2 * count), tl.load(at + 3 * count),
        tl.load(at + 4 * count), tl.load(at + 5 * count), tl.load(at + 6 * count),
        tl.load(at + 7 * count), tl.load(at + 8 * count), tl.load(at + 9 * count),
        tl.load(at + 10 * count), tl.load(at + 11 * count),
    )  # fmt: skip


@triton.jit
def _descend(
    value, gradient, column, first, second, third, start, offsets, mask,
    algorithm: tl.constexpr, variant: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Return the updated float32 weights, and update the states in memory.

    `column` holds the coefficients in the order of `triton_coefficients.py`.
    """
    gradient *= column[0]
    if algorithm == SGD:
        gradient += column[2] * value
        if variant:  # with momentum
            buffer = _load(first, start, offsets, mask, tl.float32, whole)
            # The first step that is not skipped initializes the buffer, without dampening.
            buffer = tl.where(column[6] != 0.0, gradient, column[3] * buffer + column[4] * gradient)
            _store(first, start, offsets, mask, buffer, tl.float32, whole)
            gradient = tl.where(column[5] != 0.0, gradient + column[3] * buffer, buffer)
        value -= column[1] * gradient
    elif algorithm == ADAM:
        mean = _load(first, start, offsets, mask, tl.float32, whole)
        square = _load(second, start, offsets, mask, tl.float32, whole)
        value *= column[1]
        gradient += column[2] * value
        mean += column[3] * (gradient - mean)
        square = square * column[4] + column[5] * gradient * gradient
        _store(first, start, offsets, mask, mean, tl.float32, whole)
        _store(second, start, offsets, mask, square, tl.float32, whole)
        if variant:  # amsgrad
            square = tl.maximum(square, _load(third, start, offsets, mask, tl.float32, whole))
            _store(third, start, offsets, mask, square, tl.float32, whole)
        value -= column[7] * mean / (tl.sqrt_rn(square) / column[8] + column[6])
    elif algorithm == ADAGRAD:
        gradient += column[2] * value
        total = _load(first, start, offsets, mask, tl.float32, whole) + gradient * gradient
        _store(first, start, offsets, mask, total, tl.float32, whole)
        value -= column[1] * gradient / (tl.sqrt_rn(total) + column[3])
    elif algorithm == LION:
        mean = _load(first, start, offsets, mask, tl.float32, whole)
        mixed = column[3] * mean + column[4] * gradient
        sign = (mixed > 0.0).to(tl.float32) - (mixed < 0.0).to(tl.float32)
        value = value * column[1] - column[2] * sign
        mean = column[5] * mean + column[6] * gradient
        _store(first, start, offsets, mask, mean, tl.float32, whole)
    return value


@triton.jit
def _update(
    parameter, companion, gradients, first, second, third, sample, spacing, start, remaining,
    column, seed, index, first_element,
    algorithm: tl.constexpr, variant: tl.constexpr, master_format: tl.constexpr,
    bfloat16: tl.constexpr, gradient_dtype: tl.constexpr, block: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, block)
    mask = offsets < remaining
    value = _read_weight(
        parameter, companion, column[11], start, remaining, offsets, mask,
        master_format, bfloat16, whole,
    )  # fmt: skip
    gradient = _load(gradients, start, offsets, mask, gradient_dtype, whole).to(tl.float32)
    value = _descend(
        value, gradient, column, first, second, third, start, offsets, mask,
        algorithm, variant, whole,
    )  # fmt: skip
    word = (
        _random_word(column[10], seed, index, first_element + start, offsets)
        if master_format == STOCHASTIC
        else 0
    )
    _write_weight(
        parameter, companion, sample, spacing, start, offsets, mask, value, word,
        master_format, bfloat16, whole,
    )  # fmt: skip


@triton.jit
def _random_word(draw, seed, index, start, offsets):
    """Return a random word for each element: a function of seed, element, index and draw."""
    element = start + offsets
    low, high = (element & 0xFFFFFFFF).to(tl.uint32), (element >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(
        tl.load(seed),
        low,
        high,
        (low & 0) + index.to(tl.uint32),
        (low & 0) + draw.to(tl.int32).to(tl.uint32),
    )
    return word.to(tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "addresses",
        "gradients",
        "chunks",
        "coefficients",
        "indices",
        "found_inf",
        "seed",
        "count",
    ]
)
def update_kernel(
    # int64 [10, count]: parameter, companion, three states, number of elements, first program,
    # sample, sample spacing, number of the first element in the whole parameter
    addresses,
    gradients,  # int64 [count]: addresses
    chunks,  # int32 [2, programs]: parameter, chunk of it
    coefficients,  # float32 [12, count]
    indices,  # int32 [2, count]: index in the counters, group
    found_inf,  # float32: the step is skipped unless it is 0
    seed,  # int64
    count,
    algorithm: tl.constexpr,
    variant: tl.constexpr,
    master_format: tl.constexpr,
    bfloat16: tl.constexpr,
    gradient_dtype: tl.constexpr,
    skippable: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
):
    """Unscale, clip, update and round one chunk of one parameter, unless the step is skipped."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + program)
    # 64 bits: a parameter may have more than 2^31 elements.
    start = tl.load(chunks + tl.num_programs(0) + program).to(tl.int64) * chunk
    parameter, companion = tl.load(addresses + tensor), tl.load(addresses + count + tensor)
    first, second = tl.load(addresses + 2 * count + tensor), tl.load(addresses + 3 * count + tensor)
    third, remaining = (
        tl.load(addresses + 4 * count + tensor),
        tl.load(addresses + 5 * count + tensor) - start,
    )
    sample, spacing = (
        tl.load(addresses + 7 * count + tensor),
        tl.load(addresses + 8 * count + tensor),
    )
    first_element = tl.load(addresses + 9 * count + tensor)
    gradient, index = tl.load(gradients + tensor), tl.load(indices + tensor)
    column = _column(coefficients, count, tensor)
    take_step = tl.load(found_inf) == 0.0 if skippable else True
    if take_step:
        if (remaining >= chunk) & (
            (parameter | companion | gradient | first | second | third) % 16 == 0
        ):
            for at in range(0, chunk, block):
                _update(
                    parameter, companion, gradient, first, second, third, sample, spacing,
                    start + at, remaining - at, column, seed, index, first_element,
                    algorithm, variant, master_format, bfloat16, gradient_dtype, block, True,
                )  # fmt: skip
        else:
            for at in range(0, chunk, block):
                if remaining > at:
                    _update(
                        parameter, companion, gradient, first, second, third, sample, spacing,
                        start + at, remaining - at, column, seed, index, first_element,
                        algorithm, variant, master_format, bfloat16, gradient_dtype, block, False,
                    )  # fmt: skip
