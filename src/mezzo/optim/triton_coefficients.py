"""The coefficients of an update, computed on the device from hyper-parameters, step counts, scale, norm and flag: the host need not know any of them."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN201

SGD, ADAM, ADAGRAD, LION, LAMB = (tl.constexpr(code) for code in range(5))


@triton.jit
def _put(coefficients, row: tl.constexpr, count, lane, mask, value):
    tl.store(coefficients + row * count + lane, value.to(tl.float32), mask=mask)


@triton.jit
def _sgd(coefficients, count, lane, mask, lr, decay, momentum, undampened, nesterov, step):
    _put(coefficients, 1, count, lane, mask, lr)
    _put(coefficients, 2, count, lane, mask, decay)
    _put(coefficients, 3, count, lane, mask, momentum)
    _put(coefficients, 4, count, lane, mask, undampened)
    _put(coefficients, 5, count, lane, mask, nesterov)
    _put(coefficients, 6, count, lane, mask, (step == 1.0).to(tl.float64))


@triton.jit
def _adagrad(coefficients, count, lane, mask, lr, decay, lr_decay, eps, steps):
    _put(coefficients, 1, count, lane, mask, lr / (1.0 + (steps - 1.0) * lr_decay))
    _put(coefficients, 2, count, lane, mask, decay)
    _put(coefficients, 3, count, lane, mask, eps)


@triton.jit
def _lion(coefficients, count, lane, mask, lr, decay, first_beta, second_beta):
    _put(coefficients, 1, count, lane, mask, 1.0 - lr * decay)
    _put(coefficients, 2, count, lane, mask, lr)
    _put(coefficients, 3, count, lane, mask, first_beta)
    _put(coefficients, 4, count, lane, mask, 1.0 - first_beta)
    _put(coefficients, 5, count, lane, mask, second_beta)
    _put(coefficients, 6, count, lane, mask, 1.0 - second_beta)


@triton.jit
def _adam(
    coefficients,
    count,
    lane,
    mask,
    lr,
    decay,
    first_beta,
    second_beta,
    eps,
    decoupled,
    steps,
    lamb: tl.constexpr,
):
    first = 1.0 - tl.exp(steps * tl.log(first_beta))
    second = 1.0 - tl.exp(steps * tl.log(second_beta))
    _put(coefficients, 1, count, lane, mask, tl.where(decoupled != 0.0, 1.0 - lr * decay, 1.0))
    _put(coefficients, 2, count, lane, mask, tl.where(decoupled != 0.0, 0.0, decay))
    _put(coefficients, 3, count, lane, mask, 1.0 - first_beta)
    _put(coefficients, 4, count, lane, mask, second_beta)
    _put(coefficients, 5, count, lane, mask, 1.0 - second_beta)
    _put(coefficients, 6, count, lane, mask, eps)
    # LAMB needs the first correction by itself, Adam's step takes it into the learning rate.
    _put(coefficients, 7, count, lane, mask, 1.0 / first if lamb else lr / first)
    _put(coefficients, 8, count, lane, mask, tl.sqrt(second))
    _put(coefficients, 9, count, lane, mask, lr)


@triton.jit
def _compare_sample(coefficients, addresses, tensor, count, samples: tl.constexpr):
    """Write 1 if a parameter still has the values of its sample, else 0: `samples.belongs`."""
    parameter = tl.load(addresses + tensor).to(tl.pointer_type(tl.int16))
    left = tl.load(addresses + 5 * count + tensor)
    sample = tl.load(addresses + 7 * count + tensor).to(tl.pointer_type(tl.int16))
    lane = tl.arange(0, samples)
    # 64 bits: a parameter may have more than 2^31 elements.
    at = lane.to(tl.int64) << tl.load(addresses + 8 * count + tensor)
    now = tl.load(parameter + at, mask=at < left, other=0)
    there = (now & 0x7FFF) != 0
    changed = tl.sum(
        (there & (now != tl.load(sample + lane, mask=at < left, other=0))).to(tl.int32), axis=0
    )
    own = (changed == 0) | (2 * changed < tl.sum(there.to(tl.int32), axis=0))
    tl.store(coefficients + 11 * count + tensor, own.to(tl.float32))


# Not specialized: a launch through the compiled kernel then fits any addresses and counts.
@triton.jit(
    do_not_specialize=[
        "coefficients",
        "counters",
        "places",
        "hyper",
        "scale",
        "found",
        "squares",
        "addresses",
        "count",
        "groups",
        "counters_count",
    ]
)
def prepare_kernel(
    coefficients,  # float32 [12, count]: written
    # Float32 [2, counters_count]: steps and draws of every parameter; those of this launch go up
    # unless the step is skipped.
    counters,
    places,  # int32 [2, count]: place among the counters, group
    # Float64 [8, groups]: learning rate, sign, weight decay, four of the algorithm's own, largest
    # norm.
    hyper,
    scale,  # float32: gradients are so many times too large
    found,  # float32: 0, or the step is skipped
    squares,  # float64: the sum of squares of the unscaled gradients
    addresses,  # int64 [9, count], as for the update
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
    """Compute the column of coefficients of each parameter; programs beyond those compare the sample of one parameter each."""
    program, columns = tl.program_id(0), (count + block - 1) // block
    if program < columns:
        _prepare(
            coefficients, counters, places, hyper, scale, found, squares, count, groups, counters_count, program,
            algorithm, scaled, skippable, clipped, block,
        )  # fmt: skip
    elif sampled:
        _compare_sample(coefficients, addresses, program - columns, count, samples)


@triton.jit
def _prepare(
    coefficients, counters, places, hyper, scale, found, squares, count, groups, counters_count, program,
    algorithm: tl.constexpr, scaled: tl.constexpr, skippable: tl.constexpr, clipped: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The coefficients of a block of parameters, in float64: in float32 Adam's corrections would be off by 7e-5."""
    lane = program * block + tl.arange(0, block)
    mask = lane < count
    place = tl.load(places + lane, mask=mask, other=0)
    group = tl.load(places + count + lane, mask=mask, other=0)
    good = (tl.load(found) == 0.0).to(tl.float32) if skippable else 1.0
    step = tl.load(counters + place, mask=mask, other=0.0) + good
    draws = tl.load(counters + counters_count + place, mask=mask, other=0.0) + good
    tl.store(counters + place, step, mask=mask)
    tl.store(counters + counters_count + place, draws, mask=mask)

    lr = tl.load(hyper + group, mask=mask, other=0.0)
    multiplier = tl.load(hyper + groups + group, mask=mask, other=1.0)  # -1 to maximize
    decay = tl.load(hyper + 2 * groups + group, mask=mask, other=0.0)
    one = tl.load(hyper + 3 * groups + group, mask=mask, other=0.5)
    two = tl.load(hyper + 4 * groups + group, mask=mask, other=0.5)
    three = tl.load(hyper + 5 * groups + group, mask=mask, other=0.0)
    flag = tl.load(hyper + 6 * groups + group, mask=mask, other=0.0)
    if scaled:
        multiplier = multiplier / tl.load(scale).to(tl.float64)
    if clipped:
        norm = tl.sqrt(tl.load(squares))
        share = tl.load(hyper + 7 * groups + group, mask=mask, other=1.0) / (norm + 1e-6)
        # NaN stays NaN, as in torch's clip_grad_norm_.
        multiplier = multiplier * tl.where(share > 1.0, 1.0, share)
    # A skipped first step leaves 0, and nobody uses what is made of it.
    steps = tl.maximum(step, 1.0).to(tl.float64)

    _put(coefficients, 0, count, lane, mask, multiplier)
    if algorithm == SGD:
        _sgd(coefficients, count, lane, mask, lr, decay, one, two, flag, step)
    elif algorithm == ADAGRAD:
        _adagrad(coefficients, count, lane, mask, lr, decay, one, three, steps)
    elif algorithm == LION:
        _lion(coefficients, count, lane, mask, lr, decay, one, two)
    else:
        _adam(
            coefficients,
            count,
            lane,
            mask,
            lr,
            decay,
            one,
            two,
            three,
            flag,
            steps,
            algorithm == LAMB,
        )
    _put(coefficients, 10, count, lane, mask, draws.to(tl.float64))
