"""What the fused step is told of each optimizer."""

from __future__ import annotations

import torch

from mezzo.optim.fused_algorithms import ALGORITHMS

WEIGHT = torch.nn.Parameter(torch.ones(2))


def numbers(kind: type[torch.optim.Optimizer], **options: object) -> tuple[float, ...]:
    (group,) = kind([WEIGHT], **options).param_groups
    return ALGORITHMS[kind].numbers(group)


def test_hyper_parameters_come_in_the_order_that_the_kernel_reads() -> None:
    assert numbers(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.5) == (
        0.1,
        1.0,
        0.5,
        0.9,
        0.75,
        0.0,
        0.0,
    )
    assert numbers(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True) == (
        0.1,
        -1.0,
        0,
        0.9,
        1.0,
        0.0,
        1.0,
    )
    assert numbers(torch.optim.Adam, lr=0.1, betas=(0.2, 0.3), eps=1e-4, weight_decay=0.5) == (
        0.1,
        1.0,
        0.5,
        0.2,
        0.3,
        1e-4,
        0.0,
    )
    assert numbers(torch.optim.AdamW, lr=0.1, betas=(0.2, 0.3), eps=1e-4, weight_decay=0.5) == (
        0.1,
        1.0,
        0.5,
        0.2,
        0.3,
        1e-4,
        1.0,
    )
    assert numbers(torch.optim.Adagrad, lr=0.1, lr_decay=0.2, eps=1e-4) == (
        0.1,
        1.0,
        0,
        0.2,
        0.0,
        1e-4,
        0.0,
    )


def test_every_optimizer_gives_as_many_numbers_and_at_most_three_states() -> None:
    for kind, algorithm in ALGORITHMS.items():
        (group,) = kind([WEIGHT], lr=0.1).param_groups
        assert len(algorithm.numbers(group)) == 7
        assert len(algorithm.states(group)) <= 3


def test_states_follow_the_variant() -> None:
    sgd, adam = ALGORITHMS[torch.optim.SGD], ALGORITHMS[torch.optim.Adam]
    assert sgd.states({"momentum": 0.0}) == ()
    assert sgd.states({"momentum": 0.9}) == ("momentum_buffer",)
    assert adam.states({"amsgrad": True}) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert (sgd.variant({"momentum": 0.9}), adam.variant({"amsgrad": False})) == (True, False)
