"""A parameter that is thawed after decorating does not lose its small updates."""

import pytest
import torch
from torch import nn

import mezzo

OPTIMIZERS = [torch.optim.SGD, torch.optim.RMSprop]


def made(kind, optimizer=torch.optim.SGD):
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    model.weight.requires_grad_(requires_grad=False)
    return mezzo.decorate(model, optimizer(model.parameters(), lr=1e-4), dtype="bfloat16", master=kind)


def step(model, optimizer, count, *, thawed=True):
    for _ in range(count):
        model.weight.grad = torch.ones_like(model.weight) if thawed else None
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["float32", "split"])
def test_small_updates_count_from_the_first_gradient_on(kind, optimizer):
    model, stepped = made(kind, optimizer)
    step(model, stepped, 3, thawed=False)
    assert torch.equal(model.weight, torch.ones_like(model.weight))
    weight = model.weight.requires_grad_()
    step(model, stepped, 100)
    assert model.weight is weight
    assert {number for number, held in stepped.state_dict()["state"].items() if "mezzo_master" in held} == {0, 1}
    mezzo.undecorate(model)
    plain = nn.Linear(8, 8)
    nn.init.ones_(plain.weight)
    other = optimizer(plain.parameters(), lr=1e-4)
    step(plain, other, 100)
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=0)


def test_undecorating_ends_the_watch():
    model, optimizer = made("float32")
    assert optimizer._optimizer_step_pre_hooks
    mezzo.undecorate(model)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_parameter_that_joins_the_optimizer_later_gets_a_master():
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD([model.bias], lr=1e-4)
    mezzo.decorate(model, optimizer, dtype="bfloat16", save_dtype="float32")
    step(model, optimizer, 1)
    optimizer.add_param_group({"params": [model.weight]})
    step(model, optimizer, 100)
    assert model.state_dict()["weight"].mean().item() == pytest.approx(0.99, abs=1e-4)
