"""16-bit tensors of decorated models, and masters of parameters that are trained later."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import mezzo
from mezzo.optim.master_weights import MasterWeights
from mezzo.prepare.half_weights import HalfWeights


def converted(tensor, master="float32", grad_dtype=torch.bfloat16):
    weights, rollback = HalfWeights(), ExitStack()
    weights.convert(tensor, torch.bfloat16, grad_dtype, MasterWeights(master), rollback)
    return weights, rollback


@pytest.mark.parametrize("master", ["float32", "kahan", "none"])
def test_a_rollback_restores_the_original_memory(master):
    parameter = nn.Parameter(torch.rand(4))
    parameter.grad = torch.rand(4)
    pointer, gradient = parameter.data_ptr(), parameter.grad
    _, rollback = converted(parameter, master, torch.float32)
    assert parameter.dtype is torch.bfloat16
    rollback.close()
    assert parameter.data_ptr() == pointer
    assert parameter.grad is gradient
    assert parameter.grad_dtype is torch.float32


def test_a_value_is_written_and_read_exactly():
    parameter = nn.Parameter(torch.zeros(4))
    weights, _ = converted(parameter)
    value = torch.rand(4) + 1 / 3
    weights.write(parameter, value)
    assert torch.equal(weights.read(parameter), value)
    assert torch.equal(parameter, value.bfloat16())
    assert weights.is_exact(parameter)


def test_a_grad_dtype_that_was_set_before_is_restored():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad_dtype = None
    weights, _ = converted(parameter)
    assert parameter.grad_dtype is torch.bfloat16
    weights.restore()
    assert parameter.grad_dtype is None
    assert parameter not in weights


def test_a_buffer_is_converted_and_restored_exactly():
    buffer = torch.rand(4) + 1 / 3
    original = buffer.clone()
    weights, _ = converted(buffer)
    assert buffer.dtype is torch.bfloat16
    weights.restore()
    assert torch.equal(buffer, original)


def test_channels_last_is_kept():
    parameter = nn.Parameter(torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last))
    weights, _ = converted(parameter)
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    weights.restore()
    assert parameter.is_contiguous(memory_format=torch.channels_last)


# -- parameters that are trained later -------------------------------------------------------------

OPTIMIZERS = [torch.optim.SGD, torch.optim.RMSprop]


def frozen(master, optimizer=torch.optim.SGD):
    """Return a decorated layer whose weight is frozen."""
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    model.weight.requires_grad_(requires_grad=False)
    return mezzo.decorate(
        model, optimizer(model.parameters(), lr=1e-4), dtype="bfloat16", master=master
    )


def step(model, optimizer, count, *, trained=True):
    for _ in range(count):
        model.weight.grad = torch.ones_like(model.weight) if trained else None
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("master", ["float32", "split"])
def test_small_updates_of_an_unfrozen_parameter_count_from_its_first_gradient(master, optimizer):
    model, stepped = frozen(master, optimizer)
    step(model, stepped, 3, trained=False)
    assert torch.equal(model.weight, torch.ones_like(model.weight))
    weight = model.weight.requires_grad_()
    step(model, stepped, 100)
    assert model.weight is weight
    assert {
        key for key, entries in stepped.state_dict()["state"].items() if "mezzo_master" in entries
    } == {0, 1}
    mezzo.undecorate(model)
    plain = nn.Linear(8, 8)
    nn.init.ones_(plain.weight)
    other = optimizer(plain.parameters(), lr=1e-4)
    step(plain, other, 100)
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=0)


def test_a_parameter_of_a_group_added_later_gets_a_master():
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD([model.bias], lr=1e-4)
    mezzo.decorate(model, optimizer, dtype="bfloat16", save_dtype="float32")
    step(model, optimizer, 1)
    optimizer.add_param_group({"params": [model.weight]})
    step(model, optimizer, 100)
    assert model.state_dict()["weight"].mean().item() == pytest.approx(0.99, abs=1e-4)


JOINS = {
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
@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_a_parameter_added_to_the_optimizer_in_any_way_gets_a_master(join, optimizer):
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


@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_parameter_keeps_its_exact_value_in_another_optimizer(master):
    model = nn.Linear(8, 8)
    nn.init.ones_(model.weight)
    first, second = torch.optim.SGD([model.weight], lr=1e-4), torch.optim.SGD([model.bias], lr=1e-4)
    mezzo.decorate(model, [first, second], dtype="bfloat16", master=master)
    step(model, first, 3)
    address = model.weight.data_ptr()
    second.param_groups[0]["params"].append(first.param_groups[0]["params"].pop())
    step(model, second, 3)
    # Captured graphs read it at this address.
    assert model.weight.data_ptr() == address
    mezzo.undecorate(model)
    assert model.weight.mean().item() == pytest.approx(1 - 6e-4, abs=1e-6)


def test_a_parameter_of_another_decoration_is_refused_before_the_step():
    model, optimizer = frozen("float32")
    other, _ = frozen("float32")
    optimizer.param_groups[0]["params"].append(other.bias)
    model.bias.grad, other.bias.grad = torch.ones_like(model.bias), torch.ones_like(other.bias)
    before = [one.detach().clone() for one in (*model.parameters(), *other.parameters())]
    with pytest.raises(mezzo.UnsupportedError, match=r"another mezzo.decorate .* in one call"):
        optimizer.step()
    assert all(map(torch.equal, before, (*model.parameters(), *other.parameters())))


def test_a_parameter_that_was_16_bit_before_is_updated_without_a_master():
    model, optimizer = frozen("float32")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    extra = optimizer.param_groups[1]["params"][0]
    extra.grad = torch.full_like(extra, 1e4)
    step(model, optimizer, 1)
    assert torch.equal(extra, torch.zeros_like(extra))
