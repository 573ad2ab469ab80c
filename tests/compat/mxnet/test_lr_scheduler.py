"""`mx.lr_scheduler` and the schedules of gluoncv: rates by the number of updates."""

import math

import pytest

import mezzo.compat.gluoncv as gcv
import mezzo.compat.mxnet as mx

LR = mx.lr_scheduler


def rates(scheduler, count=8):
    return [scheduler(num_update) for num_update in range(1, count + 1)]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (
            LR.FactorScheduler(2, 0.5, stop_factor_lr=0.2, base_lr=1.0),
            [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2],
        ),
        (LR.MultiFactorScheduler([2, 5], 0.1, base_lr=1.0), [1, 1, *[0.1] * 3, *[0.01] * 3]),
        (
            LR.PolyScheduler(6, base_lr=1.0, pwr=2, final_lr=0.5),
            [0.5 + 0.5 * (1 - min(n, 6) / 6) ** 2 for n in range(1, 9)],
        ),
        (
            LR.CosineScheduler(6, 1.0, warmup_steps=2, warmup_begin_lr=0.5),
            [0.75, *((1 + math.cos(math.pi * (min(n, 6) - 2) / 4)) / 2 for n in range(2, 9))],
        ),
        (
            LR.FactorScheduler(9, base_lr=1.0, warmup_steps=3, warmup_mode="constant"),
            [0, 0, *[1] * 6],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_scheduler_follows_the_formula_of_mxnet(scheduler, expected):
    assert rates(scheduler) == pytest.approx(expected)


def test_schedules_of_gluoncv_follow_one_another():
    schedule = gcv.utils.LRSequential(
        [
            gcv.utils.LRScheduler("linear", base_lr=0, target_lr=1.0, nepochs=1, iters_per_epoch=3),
            gcv.utils.LRScheduler(
                "step", 1.0, nepochs=2, iters_per_epoch=3, step_epoch=[1], step_factor=0.1
            ),
        ]
    )
    assert [schedule(n) for n in range(10)] == pytest.approx([0, 0.5, 1, 1, 1, 1, *[0.1] * 4])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("constant", [1.0] * 3), ("poly", [1, 0.25, 0]), ("cosine", [1, 0.5, 0])],
)
def test_modes_of_gluoncv(mode, expected):
    schedule = gcv.utils.LRScheduler(mode, 1.0, niters=3)
    assert [schedule(n) for n in range(3)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LR.FactorScheduler(0), ValueError, "greater or equal than 1 round"),
        (lambda: LR.FactorScheduler(1, 2.0), ValueError, "Factor must be no more than 1"),
        (lambda: LR.MultiFactorScheduler([3, 2]), ValueError, "increasing integer list"),
        (lambda: LR.PolyScheduler(0), ValueError, "must be strictly positive"),
        (lambda: LR.LRScheduler(0.1, 2, 0.2), ValueError, "higher than warmup_begin_lr"),
        (lambda: LR.LRScheduler()(1), NotImplementedError, "must be overridden"),
        (lambda: gcv.utils.LRScheduler("step"), AssertionError, "needs step_iter="),
        (lambda: gcv.utils.LRScheduler("cos"), AssertionError, "Choose one of: constant, step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_raise_as_in_mxnet(make, error, message):
    with pytest.raises(error, match=message):
        make()
