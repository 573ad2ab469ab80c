"""A masked step keeps the old values on the device where the flag is raised, first steps included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim

import mezzo
from mezzo import _events
from mezzo.scaling import masked

OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "sgd momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd damped": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.1, amsgrad=True),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw fused": lambda parameters: optim.AdamW(parameters, lr=0.1, fused=True),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "nadam": lambda parameters: optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: optim.ASGD(parameters, lr=0.1),
    "rprop": lambda parameters: optim.Rprop(parameters, lr=0.1),
}
GOOD = [torch.tensor([[1.0, -2.0, 0.5]]) * factor for factor in (1.0, 0.5, 2.0)]
BAD = GOOD[0] * math.nan


def iterate(scaler, model, optimizer, x):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def snapshot(model: nn.Module, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


@pytest.mark.parametrize("bad_at", [(0,), (1,), (0, 0, 2), (3,)], ids=["first", "second", "first two", "last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masked_training_equals_training_without_the_bad_steps(name: str, bad_at: tuple[int, ...], make_net):
    model, plain = make_net(), make_net()
    optimizer, plain_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    scaler, order = mezzo.GradScaler(skip="masked", init_scale=2.0**8), list(GOOD)
    for place in bad_at:
        order.insert(place, BAD)
    assert [iterate(scaler, model, optimizer, x).skipped for x in order] == [x is BAD for x in order]
    for x in GOOD:
        plain_optimizer.zero_grad()
        plain(x).square().mean().backward()
        plain_optimizer.step()
    ours, theirs = snapshot(model, optimizer), snapshot(plain, plain_optimizer)
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_the_memory_that_copies_take_is_told_in_the_result_and_as_an_event(net):
    optimizer, scaler = optim.Adam(net.parameters()), mezzo.GradScaler(skip="masked")
    iterate(scaler, net, optimizer, GOOD[0])
    with _events.listen() as heard:
        result = iterate(scaler, net, optimizer, GOOD[0])
    parameters = sum(parameter.nbytes for parameter in net.parameters())
    assert result.copied_bytes == 3 * parameters + 4 * 4
    assert heard == [_events.StepMasked("Adam", result.copied_bytes)]


def test_a_first_step_that_cannot_be_undone_is_decided_on_the_host_and_said_so(net):
    optimizer, scaler = OPTIMIZERS["nadam"](net.parameters()), mezzo.GradScaler(skip="masked")
    with _events.listen() as heard:
        assert iterate(scaler, net, optimizer, BAD).copied_bytes == 0
        assert iterate(scaler, net, optimizer, GOOD[0]).copied_bytes == 0
        assert iterate(scaler, net, optimizer, BAD).copied_bytes > 0
    assert [type(event) for event in heard] == [_events.StepDecidedOnHost, _events.StepDecidedOnHost, _events.StepMasked]


def test_a_step_count_on_the_host_is_refused_with_the_remedy(net, far_cpu):
    scaler = mezzo.GradScaler(skip="masked")
    with pytest.raises(mezzo.UnsupportedError, match=r"Adam\(\.\.\., capturable=True\)"):
        iterate(scaler, net, optim.Adam(net.parameters()), GOOD[0])


def test_a_number_in_the_state_is_refused_for_it_cannot_be_undone(net):
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.first.weight]["seen"] = 3
    with pytest.raises(mezzo.UnsupportedError, match="seen"):
        masked.refuse_host_counters(optimizer)


def test_parameters_without_a_gradient_are_not_copied(net):
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    assert masked.copied_bytes(optimizer) == 0
    net.first.bias.grad = torch.zeros(4)
    assert masked.copied_bytes(optimizer) == 16
