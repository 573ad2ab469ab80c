import pytest
import torch
from torch import nn

from mezzo.compat.mxnet.gluon import make

CASES = {
    "sgd": (
        {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nag": ({"learning_rate": 0.1}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "adam": (
        {"beta1": 0.8, "epsilon": 1e-6},
        lambda p: torch.optim.Adam(p, 1e-3, betas=(0.8, 0.999), eps=1e-6),
    ),
    "adamw": (
        {"learning_rate": 0.1, "wd": 0.1},
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1),
    ),
    "rmsprop": ({"rho": 0.8}, lambda p: torch.optim.RMSprop(p, 1e-3, alpha=0.8)),
    "adagrad": ({}, lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-6)),
    "adadelta": ({}, lambda p: torch.optim.Adadelta(p, 1.0, eps=1e-5)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_name_and_words_of_there_are_an_optimizer_of_here(name):
    words, expected = CASES[name]
    weights = [nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    optimizers = [make(name, [weights[0]], words), expected([weights[1]])]
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = weight.detach() * 0.5
            optimizer.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["adamax", "nadam", "lamb", "SGD"])
def test_the_others_are_made_too(name):
    assert (
        make(
            name, [nn.Parameter(torch.ones(1))], {"learning_rate": 0.5, "multi_precision": True}
        ).param_groups[0]["lr"]
        == 0.5
    )


def test_an_unknown_name_is_refused_as_there():
    with pytest.raises(ValueError, match=r"Cannot find optimizer adem.*Did you mean 'adam'"):
        make("adem", [], {})


def test_an_unknown_word_is_refused_as_there():
    with pytest.raises(
        TypeError,
        match=(
            r"'sgd' got an unexpected keyword argument 'lr'. It takes: learning_rate, wd, momentum"
        ),
    ):
        make("sgd", [nn.Parameter(torch.ones(1))], {"lr": 0.1})
