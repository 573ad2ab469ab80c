"""A parameter that is thawed after decorating does not lose its small updates."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.optim.binding import optimizer_binding

OPTIMIZERS = [torch.optim.SGD, torch.optim.RMSprop]


def made(kind, optimizer=torch.optim.SGD):
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    model.weight.requires_grad_(requires_grad=False)
    return mezzo.decorate(
        model, optimizer(model.parameters(), lr=1e-4), dtype="bfloat16", master=kind
    )


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
    assert {
        number for number, held in stepped.state_dict()["state"].items() if "mezzo_master" in held
    } == {0, 1}
    mezzo.undecorate(model)
    plain = nn.Linear(8, 8)
    nn.init.ones_(plain.weight)
    other = optimizer(plain.parameters(), lr=1e-4)
    step(plain, other, 100)
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=0)


def test_undecorating_ends_the_watch():
    model, optimizer = made("float32")
    bound = optimizer_binding(optimizer)
    assert bound.on_missing_masters is not None
    mezzo.undecorate(model)
    assert bound.on_missing_masters is None


def test_a_parameter_that_joins_the_optimizer_later_gets_a_master():
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD([model.bias], lr=1e-4)
    mezzo.decorate(model, optimizer, dtype="bfloat16", save_dtype="float32")
    step(model, optimizer, 1)
    optimizer.add_param_group({"params": [model.weight]})
    step(model, optimizer, 100)
    assert model.state_dict()["weight"].mean().item() == pytest.approx(0.99, abs=1e-4)


ROADS = {
    "extend": lambda optimizer, weight: optimizer.param_groups[0]["params"].extend([weight]),
    "append": lambda optimizer, weight: optimizer.param_groups[0]["params"].append(weight),
    "other list": lambda optimizer, weight: optimizer.param_groups[0].update(params=[weight]),
    "other element": (
        lambda optimizer, weight: optimizer.param_groups[0]["params"].__setitem__(0, weight)
    ),
    "other groups": lambda optimizer, weight: setattr(
        optimizer, "param_groups", [{**optimizer.param_groups[0], "params": [weight]}]
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("join", ROADS.values(), ids=ROADS)
def test_a_parameter_gets_a_master_however_it_joins_the_optimizer(join, optimizer):
    def run(model, stepped, scaler):
        for count in range(41):
            if count == 1:
                join(stepped, model.weight)
            model.weight.grad, model.bias.grad = (
                torch.ones_like(model.weight),
                torch.ones_like(model.bias),
            )
            if scaler is not None:
                scaler.scale(torch.ones(()))
                scaler.step(stepped)
                scaler.update()
            else:
                stepped.step()

    for scaler in (None, mezzo.GradScaler("cpu", init_scale=1.0)):
        models = [nn.Linear(8, 8), nn.Linear(8, 8)]
        for model in models:
            nn.init.ones_(model.weight)
        model, plain = models
        stepped = optimizer([model.bias], lr=1e-4)
        mezzo.decorate(model, stepped, dtype="bfloat16")
        run(model, stepped, scaler)
        run(plain, optimizer([plain.bias], lr=1e-4), None)
        torch.testing.assert_close(mezzo.undecorate(model).weight, plain.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["float32", "split"])
def test_a_parameter_that_changes_its_optimizer_takes_its_exact_value_along(kind):
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    first, second = torch.optim.SGD([model.weight], lr=1e-4), torch.optim.SGD([model.bias], lr=1e-4)
    mezzo.decorate(model, [first, second], dtype="bfloat16", master=kind)
    step(model, first, 3)
    address = model.weight.data_ptr()
    second.param_groups[0]["params"].append(first.param_groups[0]["params"].pop())
    step(model, second, 3)
    # Captured graphs read it where it was.
    assert model.weight.data_ptr() == address
    mezzo.undecorate(model)
    assert model.weight.mean().item() == pytest.approx(1 - 6e-4, abs=1e-6)


def test_a_parameter_of_another_decoration_is_refused_before_the_step():
    model, optimizer = made("float32")
    other, _ = made("float32")
    optimizer.param_groups[0]["params"].append(other.bias)
    model.bias.grad, other.bias.grad = torch.ones_like(model.bias), torch.ones_like(other.bias)
    before = [one.detach().clone() for one in (*model.parameters(), *other.parameters())]
    with pytest.raises(mezzo.UnsupportedError, match=r"another mezzo.decorate .* in one call"):
        optimizer.step()
    assert all(map(torch.equal, before, (*model.parameters(), *other.parameters())))


def test_a_parameter_that_was_16_bit_already_is_stepped_as_it_is():
    model, optimizer = made("float32")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    extra = optimizer.param_groups[1]["params"][0]
    extra.grad = torch.full_like(extra, 1e4)
    step(model, optimizer, 1)
    assert torch.equal(extra, torch.zeros_like(extra))
