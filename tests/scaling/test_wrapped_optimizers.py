"""Optimizers inside optimizers are found, and a scaler steps them without their masters noticing."""

import pytest
import torch
from support.wrappers import Lookahead, Several
from torch import nn

import mezzo
from mezzo.scaling.optimizer_step import bindings_of, inner_optimizers


def sgd(*, dtype=torch.float32):
    return torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=dtype))], lr=0.1)


def test_inner_optimizers_are_found_in_attributes_and_containers():
    one, other = sgd(), sgd()
    assert inner_optimizers(one) == {}
    assert inner_optimizers(Lookahead(one)) == {".optimizer": one}
    assert inner_optimizers(Several([one, other])) == {
        "._parts['all'][0]": one,
        "._parts['all'][1]": other,
    }
    wrapped = Lookahead(Lookahead(one))
    assert inner_optimizers(wrapped) == {
        ".optimizer": wrapped.optimizer,
        ".optimizer.optimizer": one,
    }


def test_an_optimizer_that_holds_itself_is_not_inside_itself():
    one = sgd()
    one.itself, one.ring = one, []
    one.ring.append(one.ring)
    assert inner_optimizers(one) == {}


def test_the_public_name_is_given_where_there_is_one():
    class Delegating(torch.optim.SGD):
        optimizer = property(lambda self: self._optimizer)

    outer = Delegating([torch.zeros(1)], lr=0.1)
    outer._optimizer = outer._other = inner = sgd()
    assert inner_optimizers(outer) == {".optimizer": inner}


def test_bindings_are_found_through_wrappers():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert bindings_of(Lookahead(optimizer)) == []
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert bindings_of(optimizer) == bindings_of(Lookahead(optimizer)) == [optimizer._bound]


@pytest.mark.parametrize("unscales", [False, True])
def test_a_wrapped_decorated_optimizer_gets_gradients_that_are_unscaled_in_float32(unscales):
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mezzo.decorate(model, optimizer, dtype="float16", save_dtype="float32")
    wrapped, scaler = Several([optimizer]), mezzo.GradScaler("cpu", init_scale=2.0**16)
    nn.init.zeros_(model.weight)
    # Divided in float16 it would be zero.
    scaler.scale(torch.ones(()))
    model.weight.grad = torch.full_like(model.weight, 2.0**-12)
    if unscales:
        scaler.unscale_(wrapped)
    assert not scaler.step(wrapped).skipped
    assert model.state_dict()["weight"].item() == -(2.0**-28)
    scaler.update()
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    assert scaler.step(wrapped).skipped


def test_a_wrapper_that_shows_the_attributes_of_its_optimizer_is_not_given_the_scale():
    class Delegating(Several):
        def __getattr__(self, name):
            return getattr(self._parts["all"][0], name)

    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    inner._step_supports_amp_scaling = True
    wrapped, scaler = Delegating([inner]), mezzo.GradScaler("cpu", init_scale=4.0)
    (weight,) = inner.param_groups[0]["params"]
    scaler.scale(weight * 0.125).backward()
    scaler.step(wrapped)
    assert weight.item() == 0.875
