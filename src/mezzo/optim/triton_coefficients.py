"""Triton kernel that computes the coefficients of an update, one column for each parameter.

It reads hyper-parameters, step counts, loss scale, gradient norm and found_inf on the device, so
that the host needs none of them. Row 0 is the factor of the gradient, row 10 the number of random
draws, row 11 whether the parameter matches its sample; the rows between are the algorithm's.
"""

from __future__ import annotations

import triton
import triton.language as tl

SGD, ADAM, ADAGRAD, LION, LAMB = (tl.constexpr(code) for code in range(5))


@triton.jit
def _store_row(coefficients, row: tl.constexpr, count, lane, mask, value):
    tl.store(coefficients + row * count + lane, value.to(tl.float32), mask=mask)


@triton.jit
def _sgd(coefficients, count, lane, mask, lr, decay, momentum, undampened, nesterov, step):
    _store_row(coefficients, 1, count, lane, mask, lr)
    _store_row(coefficients, 2, count, lane, mask, decay)
    _store_row(coefficients, 3, count, lane, mask, momentum)
    _store_row(coefficients, 4, count, lane, mask, undampened)
    _store_row(coefficients, 5, count, lane, mask, nesterov)
    _store_row(coefficients, 6, count, lane, mask, (step == 1.0).to(tl.float64))


@triton.jit
def _adagrad(coefficients, count, lane, mask, lr, decay, lr_decay, eps, steps):
    _store_row(coefficients, 1, count, lane, mask, lr / (1.0 + (steps - 1.0) * lr_decay))
    _store_row(coefficients, 2, count, lane, mask, decay)
    _store_row(coefficients, 3, count, lane, mask, eps)


@triton.jit
def _lion(coefficients, count, lane, mask, lr, decay, first_beta, second_beta):
    _store_row(coefficients, 1, count, lane, mask, 1.0 - lr * decay)
    _store_row(coefficients, 2, count, lane, mask, lr)
    _store_row(coefficients, 3, count, lane, mask, first_beta)
    _store_row(coefficients, 4, count, lane, mask, 1.0 - first_beta)
    _store_row(coefficients, 5, count, lane, mask, second_beta)
    _store_row(coefficients, 6, count, lane, mask, 1.0 - second_beta)


@triton.jit
def _adam(
    coefficients, count, lane, mask, lr, decay, first_beta, second_beta, eps, decoupled, steps,
    lamb: tl.constexpr,
):  # fmt: skip
    first = 1.0 - tl.exp(steps * tl.log(first_beta))
    second = 1.0 - tl.exp(steps * tl.log(second_beta))
    _store_row(
        coefficients, 1, count, lane, mask, tl.where(decoupled != 0.0, 1.0 - lr * decay, 1.0)
    )
    _store_row(coefficients, 2, count, lane, mask, tl.where(decoupled != 0.0, 0.0, decay))
    _store_row(coefficients, 3, count, lane, mask, 1.0 - first_beta)
    _store_row(coefficients, 4, count, lane, mask, second_beta)
    _store_row(coefficients, 5, count, lane, mask, 1.0 - second_beta)
    _store_row(coefficients, 6, count, lane, mask, eps)
    # Adam multiplies the first correction into the learning rate; LAMB needs it separately.
    _store_row(coefficients, 7, count, lane, mask, 1.0 / first if lamb else lr / first)
    _store_row(coefficients, 8, count, lane, mask, tl.sqrt(second))
    _store_row(coefficients, 9, count, lane, mask, lr)


@triton.jit
def _compare_sample(coefficients, addresses, tensor, count, samples: tl.constexpr):
    """Store 1 if a parameter matches its sample, else 0: `master_weights.matches_sample`."""
    parameter = tl.load(addresses + tensor).to(tl.pointer_type(tl.int16))
    numel = tl.load(addresses + 5 * count + tensor)
    sample = tl.load(addresses + 7 * count + tensor).to(tl.pointer_type(tl.int16))
    lane = tl.arange(0, samples)
    # 64 bits: a parameter may have more than 2^31 elements.
    at = lane.to(tl.int64) << tl.load(addresses + 8 * count + tensor)
    now = tl.load(parameter + at, mask=at < numel, other=0)
    nonzero = (now & 0x7FFF) != 0
    before = tl.load(sample + lane, mask=at < numel, other=0)
    changed = tl.sum((nonzero & (now != before)).to(tl.int32), axis=0)
    matches = (changed == 0) | (2 * changed < tl.sum(nonzero.to(tl.int32), axis=0))
    tl.store(coefficients + 11 * count + tensor, matches.to(tl.float32))


# Not specialized, so that one compiled kernel can be launched with any addresses and counts.
@triton.jit(
    do_not_specialize=[
        "coefficients",
        "counters",
        "indices",
        "hyper",
        "scale",
        "found_inf",
        "squares",
        "addresses",
        "count",
        "groups",
        "counters_count",
    ]
)
def prepare_kernel(
    coefficients,  # float32 [12, count]: output
    # float32 [2, counters_count]: steps and random draws of all parameters of the optimizer; those
    # of this launch are incremented unless the step is skipped
    counters,
    indices,  # int32 [2, count]: index in the counters, group
    # float64 [8, groups]: learning rate, sign, weight decay, four numbers of the algorithm, maximum
    # norm
    hyper,
    scale,  # float32: the loss scale, by which the gradients are multiplied
    found_inf,  # float32: the step is skipped unless it is 0
    squares,  # float64: sum of squares of the unscaled gradients
    addresses,  # int64 [10, count]: see `update_kernel`
    count,
    groups,
    counters_count,
    algorithm: tl.constexpr,
    scaled: tl.constexpr,
    skippable: tl.constexpr,
    clipped: tl.constexpr,
    sampled: tl.constexpr,
    block: tl.constexpr,
    samples: tl.constexpr,
):
    """Compute the coefficients of a block of parameters; later programs compare one sample each."""
    program, columns = tl.program_id(0), (count + block - 1) // block
    if program < columns:
        _prepare(
            coefficients, counters, indices, hyper, scale, found_inf, squares,
            count, groups, counters_count, program,
            algorithm, scaled, skippable, clipped, block,
        )  # fmt: skip
    elif sampled:
        _compare_sample(coefficients, addresses, program - columns, count, samples)


@triton.jit
def _prepare(
    coefficients, counters, indices, hyper, scale, found_inf, squares,
    count, groups, counters_count, program,
    algorithm: tl.constexpr, scaled: tl.constexpr, skippable: tl.constexpr, clipped: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    # In float64, because Adam's bias corrections would be off by 7e-5 in float32.
    lane = program * block + tl.arange(0, block)
    mask = lane < count
    index = tl.load(indices + lane, mask=mask, other=0)
    group = tl.load(indices + count + lane, mask=mask, other=0)
    take_step = (tl.load(found_inf) == 0.0).to(tl.float32) if skippable else 1.0
    step = tl.load(counters + index, mask=mask, other=0.0) + take_step
    draws = tl.load(counters + counters_count + index, mask=mask, other=0.0) + take_step
    tl.store(counters + index, step, mask=mask)
    tl.store(counters + counters_count + index, draws, mask=mask)

    lr = tl.load(hyper + group, mask=mask, other=0.0)
    factor = tl.load(hyper + groups + group, mask=mask, other=1.0)  # -1 to maximize
    decay = tl.load(hyper + 2 * groups + group, mask=mask, other=0.0)
    first = tl.load(hyper + 3 * groups + group, mask=mask, other=0.5)
    second = tl.load(hyper + 4 * groups + group, mask=mask, other=0.5)
    third = tl.load(hyper + 5 * groups + group, mask=mask, other=0.0)
    flag = tl.load(hyper + 6 * groups + group, mask=mask, other=0.0)
    if scaled:
        factor = factor / tl.load(scale).to(tl.float64)
    if clipped:
        norm = tl.sqrt(tl.load(squares))
        ratio = tl.load(hyper + 7 * groups + group, mask=mask, other=1.0) / (norm + 1e-6)
        # NaN stays NaN, as in torch's clip_grad_norm_.
        factor = factor * tl.where(ratio > 1.0, 1.0, ratio)
    # A skipped first step leaves 0; its coefficients are not used.
    steps = tl.maximum(step, 1.0).to(tl.float64)

    _store_row(coefficients, 0, count, lane, mask, factor)
    if algorithm == SGD:
        _sgd(coefficients, count, lane, mask, lr, decay, first, second, flag, step)
    elif algorithm == ADAGRAD:
        _adagrad(coefficients, count, lane, mask, lr, decay, first, third, steps)
    elif algorithm == LION:
        _lion(coefficients, count, lane, mask, lr, decay, first, second)
    else:
        _adam(
            coefficients, count, lane, mask, lr, decay, first, second, third, flag, steps,
            algorithm == LAMB,
        )  # fmt: skip
    _store_row(coefficients, 10, count, lane, mask, draws.to(tl.float64))
