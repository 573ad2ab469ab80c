"""What cannot be prepared is refused with the right order or the remedy."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import mezzo
from mezzo.prepare.arguments import models_of, optimizers_of


def sgd(*models):
    return torch.optim.SGD(
        [parameter for model in models for parameter in model.parameters()], lr=0.1
    )


def refused(*args, error=mezzo.PolicyError, **words):
    with pytest.raises(error) as caught:
        mezzo.decorate(*args, **{"dtype": "bfloat16", **words})
    return str(caught.value)


def test_nested_lists_are_read_each_once():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert models_of([one, (other, [one])]) == (one, other)
    first = sgd(one)
    assert optimizers_of([first, [first]]) == (first,)
    assert optimizers_of(None) == ()


@pytest.mark.parametrize(
    "wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel]
)
def test_a_wrapped_model_is_told_the_right_order(wrapper):
    inner = nn.Linear(2, 2)
    wrapped = wrapper.__new__(wrapper)
    nn.Module.__init__(wrapped)
    wrapped.module = inner
    for model in (wrapped, nn.Sequential(wrapped)):
        message = refused(model, sgd(inner), error=mezzo.UnsupportedError)
        assert "First decorate, then wrap" in message
        assert wrapper.__name__ in message


def test_a_fully_sharded_module_is_told_the_right_order():
    # What fully_shard does to the class of a module.
    model = nn.Linear(2, 2)
    model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert "First decorate, then wrap" in refused(model, error=mezzo.UnsupportedError)


def test_a_model_without_floating_point_parameters_is_refused():
    assert "no parameters" in refused(nn.ReLU())
    model = nn.Module()
    model.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    assert "only parameters of torch.int64" in refused(model)


def test_a_parameter_without_memory_is_refused():
    message = refused(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), error=mezzo.UnsupportedError
    )
    assert "'1.weight' is on the meta device" in message


def test_a_parameter_without_a_shape_is_refused():
    message = refused(nn.Sequential(nn.LazyLinear(3)), error=mezzo.UnsupportedError)
    assert "'0.weight' has no shape before the model has seen an input" in message


def test_an_optimizer_over_other_parameters_is_refused():
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert (
        "SGD has 2 parameters, of which 2 are not the model's (the first of shape (3, 2))"
        in refused(one, sgd(other))
    )
    assert "SGD has 4 parameters, of which 2 are not" in refused(one, sgd(one, other))


def test_a_parameter_in_two_optimizers_is_refused():
    model = nn.Linear(2, 2)
    assert "in two of the optimizers" in refused(model, [sgd(model), sgd(model)])


def test_what_is_no_model_or_optimizer_is_refused():
    assert "model=3 is not a torch.nn.Module" in refused(3)
    assert "model=[] holds no model" in refused([])
    assert "optimizer=3 is not" in refused(nn.Linear(1, 1), 3)
    assert "policy='O2'" in refused(nn.Linear(1, 1), "O2")


def test_a_scripted_model_is_refused():
    class Scripted(torch.jit.ScriptModule):
        pass

    assert "scripted" in refused(Scripted(), error=mezzo.UnsupportedError)


def test_parameters_on_two_kinds_of_device_are_refused(monkeypatch):
    from mezzo.prepare import arguments

    monkeypatch.setattr(arguments, "_refuse_without_values", lambda model: None)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    assert "live on cpu and meta" in refused(model, error=mezzo.UnsupportedError)
