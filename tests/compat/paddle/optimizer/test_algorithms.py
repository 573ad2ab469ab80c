"""Each optimizer steps as torch's or mezzo's with the same numbers, under Paddle's names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.paddle import optimizer as paddles
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name

TWINS = {
    "SGD": (
        paddles.SGD,
        {"weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    ),
    "Momentum": (
        paddles.Momentum,
        {"momentum": 0.8, "use_nesterov": True, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "Adam": (
        paddles.Adam,
        {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "AdamW": (
        paddles.AdamW,
        {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.01),
    ),
    "Lamb": (
        paddles.Lamb,
        {"lamb_weight_decay": 0.2, "beta1": 0.8, "epsilon": 1e-3},
        lambda p: mezzo.LAMB(p, lr=0.1, betas=(0.8, 0.999), eps=1e-3, weight_decay=0.2),
    ),
    "Adagrad": (
        paddles.Adagrad,
        {"epsilon": 1e-3, "initial_accumulator_value": 0.5, "weight_decay": 0.1},
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, eps=1e-3, initial_accumulator_value=0.5, weight_decay=0.1
        ),
    ),
    "Adadelta": (
        paddles.Adadelta,
        {"epsilon": 1e-3, "rho": 0.8},
        lambda p: torch.optim.Adadelta(p, lr=0.1, eps=1e-3, rho=0.8),
    ),
    "Adamax": (
        paddles.Adamax,
        {"beta1": 0.8, "epsilon": 1e-3},
        lambda p: torch.optim.Adamax(p, lr=0.1, betas=(0.8, 0.999), eps=1e-3),
    ),
    "RMSProp": (
        paddles.RMSProp,
        {"rho": 0.8, "epsilon": 1e-3, "momentum": 0.5, "centered": True},
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.8, eps=1e-3, momentum=0.5, centered=True),
    ),
}


def trained(make) -> list[float]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = make([weight])
    for _ in range(3):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("name", TWINS)
def test_it_steps_as_its_twin(name):
    kind, words, twin = TWINS[name]
    assert trained(
        lambda parameters: kind(learning_rate=0.1, parameters=parameters, **words)
    ) == trained(twin)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("Momentum", {"lr": 0.001, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}),
        ("Adam", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("AdamW", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
        ("Lamb", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}),
        ("Adadelta", {"lr": 0.001, "eps": 1e-6, "rho": 0.95}),
    ],
)
def test_defaults_are_paddles(name, defaults):
    (group,) = getattr(paddles, name)(parameters=[nn.Parameter(torch.ones(1))]).param_groups
    assert {key: group[key] for key in defaults} == defaults


@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adam", "AdamW", "Lamb", "Adagrad"])
def test_what_torch_and_mezzo_fuse_is_fused_here(name):
    assert (
        algorithm_name(
            getattr(paddles, name)(learning_rate=0.1, parameters=[nn.Parameter(torch.ones(1))])
        )
        in ALGORITHMS
    )


def test_lamb_leaves_what_it_is_told_to_without_decay():
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = paddles.Lamb(
        parameters=[weight, bias], exclude_from_weight_decay_fn=lambda one: one is bias
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[1]["params"] == [bias]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: paddles.Momentum(parameters=p, rescale_grad=0.5),
            "rescale_grad=0.5 is not carried out here. Scale the loss instead",
        ),
        (
            lambda p: paddles.AdamW(parameters=p, apply_decay_param_fun=bool),
            "Pass groups: parameters=",
        ),
    ],
    ids=["rescale_grad", "apply_decay_param_fun"],
)
def test_words_that_are_not_carried_out_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(1))])


def test_multi_precision_is_remembered():
    optimizer = paddles.Adam(parameters=[nn.Parameter(torch.ones(1))], multi_precision=True)
    assert optimizer._multi_precision
