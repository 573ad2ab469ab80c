"""The Triton side of `fused.py`: imported only where it is used, since Triton is optional.

A launch covers many parameters of one dtype, kind of master and gradient dtype. A program updates
one chunk of one parameter; what it needs to know of it, it finds in tables: addresses that are
constant from step to step, addresses of gradients, and a column of coefficients that were computed
just before.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from mezzo.optim.triton_coefficients import ADAGRAD, ADAM, LION, SGD

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN201, PLR0124, PLR2004

PLAIN, FLOAT32, SPLIT, KAHAN, STOCHASTIC, NONE = (tl.constexpr(code) for code in range(6))
"""PLAIN is a float32 parameter, the others are 16-bit parameters by the kind of their master."""

HEADER: tl.constexpr = tl.constexpr(32)
"""So many elements of a chunk are compared with what their master rounds to, to notice that
somebody wrote the parameter: one sector of memory."""


# -- 16-bit numbers as bits: the same on a GPU and in the interpreter, which cuts off where a GPU rounds


@triton.jit
def _widen(bits, bfloat16: tl.constexpr):
    """The float32 value of 16 bits."""
    if bfloat16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _round(value, bfloat16: tl.constexpr):
    """The bits of the nearest 16-bit number, ties to even."""
    if bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, nearest, 0x7FC0).to(tl.int16)
    return value.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _round_stochastically(value, word, bfloat16: tl.constexpr):
    """The bits of one of the two neighbours, as `kinds.round_at_random` draws it."""
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
    # Told that it is aligned, Triton loads and stores 16 bytes at a time.
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def _load(address, start, within, mask, dtype: tl.constexpr, whole: tl.constexpr):
    if whole:
        return tl.load(_at(address, start, dtype, True) + within)
    return tl.load(_at(address, start, dtype, False) + within, mask=mask, other=0)


@triton.jit
def _store(address, start, within, mask, value, dtype: tl.constexpr, whole: tl.constexpr):
    if whole:
        tl.store(_at(address, start, dtype, True) + within, value)
    else:
        tl.store(_at(address, start, dtype, False) + within, value, mask=mask)


@triton.jit
def _read_weight(
    parameter,
    beside,
    own,
    start,
    left,
    within,
    mask,
    kind: tl.constexpr,
    bfloat16: tl.constexpr,
    whole: tl.constexpr,
):
    """The exact weight. `own` is 0 where what lies beside the parameter belongs to a value that was overwritten."""
    if kind == PLAIN:
        return _load(parameter, start, within, mask, tl.float32, whole)
    if kind == FLOAT32:
        value = _load(beside, start, within, mask, tl.float32, whole)
        # Whoever writes a whole parameter past torch's version counter (`p.data.copy_`) is noticed
        # by the first elements of each chunk.
        head = tl.arange(0, HEADER)
        inside = head < left
        shown = tl.load(_at(parameter, start, tl.int16, False) + head, mask=inside, other=0)
        master = tl.load(_at(beside, start, tl.float32, False) + head, mask=inside, other=0.0)
        if tl.max((shown != _round(master, bfloat16)).to(tl.int32), axis=0) != 0:
            bits = _load(parameter, start, within, mask, tl.int16, whole)
            value = tl.where(bits == _round(value, bfloat16), value, _widen(bits, bfloat16))
        return value
    bits = _load(parameter, start, within, mask, tl.int16, whole)
    if kind == SPLIT:
        remainder = _load(beside, start, within, mask, tl.int16, whole).to(tl.int32) * own.to(
            tl.int32
        )
        # Zero has no negative remainder, see `kinds.Split`.
        remainder = tl.where((bits & 0x7FFF) == 0, tl.maximum(remainder, 0), remainder)
        return ((bits.to(tl.int32) << 16) + remainder).to(tl.float32, bitcast=True)
    value = _widen(bits, bfloat16)
    if kind == KAHAN:
        lost = _widen(_load(beside, start, within, mask, tl.int16, whole), bfloat16) * own
        # A compensation that is too large to be the parameter's is that of another, which somebody
        # overwrote.
        value = tl.where(_round(value + lost * 0.5, bfloat16) == bits, value + lost, value)
    return value


@triton.jit
def _store_sample(sample, spacing, start, within, mask, bits):
    """Keep the sampled elements of a block. Blocks start at multiples of their size, so that most blocks of a large parameter hold none."""
    if ((start >> spacing) << spacing) == start:
        at = start + within
        tl.store(
            sample.to(tl.pointer_type(tl.int16)) + (at >> spacing),
            bits,
            mask=mask & (((at >> spacing) << spacing) == at),
        )


@triton.jit
def _write_weight(
    parameter,
    beside,
    sample,
    spacing,
    start,
    within,
    mask,
    value,
    word,
    kind: tl.constexpr,
    bfloat16: tl.constexpr,
    whole: tl.constexpr,
):
    """The parameter, what lies beside it, and its sample."""
    if kind == PLAIN:
        _store(parameter, start, within, mask, value, tl.float32, whole)
    elif kind == SPLIT:
        # A GPU's NaN has every bit set and would wrap around to zero.
        bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        _store(parameter, start, within, mask, upper.to(tl.int16), tl.int16, whole)
        _store_sample(sample, spacing, start, within, mask, upper.to(tl.int16))
        _store(beside, start, within, mask, (bits - (upper << 16)).to(tl.int16), tl.int16, whole)
    elif kind == STOCHASTIC:
        _store(
            parameter,
            start,
            within,
            mask,
            _round_stochastically(value, word, bfloat16),
            tl.int16,
            whole,
        )
    else:
        bits = _round(value, bfloat16)
        _store(parameter, start, within, mask, bits, tl.int16, whole)
        if kind == FLOAT32:
            _store(beside, start, within, mask, value, tl.float32, whole)
        if kind == KAHAN:
            _store(
                beside,
                start,
                within,
                mask,
                _round(value - _widen(bits, bfloat16), bfloat16),
                tl.int16,
                whole,
            )
            _store_sample(sample, spacing, start, within, mask, bits)


# -- updating --------------------------------------------------------------------------------------


@triton.jit
def _column(coefficients, count, tensor):
    """The coefficients of one parameter. What an algorithm does not use, the compiler leaves out."""
    at = coefficients + tensor
    return (
        tl.load(at), tl.load(at + count), tl.load(at + 2 * count), tl.load(at + 3 * count), tl.load(at + 4 * count), tl.load(at + 5 * count),
        tl.load(at + 6 * count), tl.load(at + 7 * count), tl.load(at + 8 * count), tl.load(at + 9 * count), tl.load(at + 10 * count),
        tl.load(at + 11 * count),
    )  # fmt: skip


@triton.jit
def _descend(
    value,
    gradient,
    column,
    first,
    second,
    third,
    start,
    within,
    mask,
    algorithm: tl.constexpr,
    variant: tl.constexpr,
    whole: tl.constexpr,
):
    """One step of an algorithm on float32 numbers, its states read and written; the columns are those of `coefficients`."""
    gradient *= column[0]
    if algorithm == SGD:
        gradient += column[2] * value
        if variant:  # with momentum
            buffer = _load(first, start, within, mask, tl.float32, whole)
            # The first step that is not skipped starts the buffer, undampened.
            buffer = tl.where(column[6] != 0.0, gradient, column[3] * buffer + column[4] * gradient)
            _store(first, start, within, mask, buffer, tl.float32, whole)
            gradient = tl.where(column[5] != 0.0, gradient + column[3] * buffer, buffer)
        value -= column[1] * gradient
    elif algorithm == ADAM:
        mean = _load(first, start, within, mask, tl.float32, whole)
        square = _load(second, start, within, mask, tl.float32, whole)
        value *= column[1]
        gradient += column[2] * value
        mean += column[3] * (gradient - mean)
        square = square * column[4] + column[5] * gradient * gradient
        _store(first, start, within, mask, mean, tl.float32, whole)
        _store(second, start, within, mask, square, tl.float32, whole)
        if variant:  # amsgrad
            square = tl.maximum(square, _load(third, start, within, mask, tl.float32, whole))
            _store(third, start, within, mask, square, tl.float32, whole)
        value -= column[7] * mean / (tl.sqrt_rn(square) / column[8] + column[6])
    elif algorithm == ADAGRAD:
        gradient += column[2] * value
        total = _load(first, start, within, mask, tl.float32, whole) + gradient * gradient
        _store(first, start, within, mask, total, tl.float32, whole)
        value -= column[1] * gradient / (tl.sqrt_rn(total) + column[3])
    elif algorithm == LION:
        mean = _load(first, start, within, mask, tl.float32, whole)
        mixed = column[3] * mean + column[4] * gradient
        sign = (mixed > 0.0).to(tl.float32) - (mixed < 0.0).to(tl.float32)
        value = value * column[1] - column[2] * sign
        _store(
            first, start, within, mask, column[5] * mean + column[6] * gradient, tl.float32, whole
        )
    return value


@triton.jit
def _update(
    parameter, beside, gradients, first, second, third, sample, spacing, start, left, column, seed, place,
    algorithm: tl.constexpr, variant: tl.constexpr, kind: tl.constexpr, bfloat16: tl.constexpr, gradient_dtype: tl.constexpr, block: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    within = tl.arange(0, block)
    mask = within < left
    value = _read_weight(
        parameter, beside, column[11], start, left, within, mask, kind, bfloat16, whole
    )
    gradient = _load(gradients, start, within, mask, gradient_dtype, whole).to(tl.float32)
    value = _descend(
        value,
        gradient,
        column,
        first,
        second,
        third,
        start,
        within,
        mask,
        algorithm,
        variant,
        whole,
    )
    word = _random_word(column[10], seed, place, start, within) if kind == STOCHASTIC else 0
    _write_weight(
        parameter, beside, sample, spacing, start, within, mask, value, word, kind, bfloat16, whole
    )


@triton.jit
def _random_word(draw, seed, place, start, within):
    """A random word for each element: a function of seed, element, parameter and draw alone."""
    element = start + within
    low, high = (element & 0xFFFFFFFF).to(tl.uint32), (element >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(
        tl.load(seed),
        low,
        high,
        (low & 0) + place.to(tl.uint32),
        (low & 0) + draw.to(tl.int32).to(tl.uint32),
    )
    return word.to(tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "addresses",
        "gradients",
        "chunks",
        "coefficients",
        "places",
        "found",
        "seed",
        "count",
    ]
)
def update_kernel(
    # Int64 [9, count]: parameter, beside, three states, number of elements, first program, sample,
    # its spacing.
    addresses,
    gradients,  # int64 [count]
    chunks,  # int32 [2, programs]: parameter, chunk of it
    coefficients,  # float32 [12, count]
    places,  # int32 [2, count]
    found,  # float32
    seed,  # int64
    count,
    algorithm: tl.constexpr,
    variant: tl.constexpr,
    kind: tl.constexpr,
    bfloat16: tl.constexpr,
    gradient_dtype: tl.constexpr,
    skippable: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
):
    """Unscale, clip, update and round one chunk of one parameter, block by block, or leave everything as it is."""
    program = tl.program_id(0)
    tensor = tl.load(chunks + program)
    # 64 bits: a parameter may have more than 2^31 elements.
    start = tl.load(chunks + tl.num_programs(0) + program).to(tl.int64) * chunk
    parameter, beside = tl.load(addresses + tensor), tl.load(addresses + count + tensor)
    first, second = tl.load(addresses + 2 * count + tensor), tl.load(addresses + 3 * count + tensor)
    third, left = (
        tl.load(addresses + 4 * count + tensor),
        tl.load(addresses + 5 * count + tensor) - start,
    )
    sample, spacing = (
        tl.load(addresses + 7 * count + tensor),
        tl.load(addresses + 8 * count + tensor),
    )
    gradient, place = tl.load(gradients + tensor), tl.load(places + tensor)
    column = _column(coefficients, count, tensor)
    good = tl.load(found) == 0.0 if skippable else True
    if good:
        if (left >= chunk) & ((parameter | beside | gradient | first | second | third) % 16 == 0):
            for at in range(0, chunk, block):
                _update(
                    parameter, beside, gradient, first, second, third, sample, spacing, start + at, left - at, column, seed, place,
                    algorithm, variant, kind, bfloat16, gradient_dtype, block, True,
                )  # fmt: skip
        else:
            for at in range(0, chunk, block):
                if left > at:
                    _update(
                        parameter, beside, gradient, first, second, third, sample, spacing, start + at, left - at, column, seed, place,
                        algorithm, variant, kind, bfloat16, gradient_dtype, block, False,
                    )  # fmt: skip
