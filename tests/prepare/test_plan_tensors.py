"""Every tensor is found once, with all its names and its owner."""

import torch
from torch import nn

from mezzo.policy.types import Level, Master
from mezzo.prepare.arguments import KeepFull, Targets
from mezzo.prepare.plan_rows import TensorRule, plan_tensors


def test_a_tensor_is_found_once_with_all_its_names():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = one.weight
    (found,) = plan_tensors(Targets((nn.Sequential(one, one), other), ()), KeepFull(()))
    assert found.names == ("models[0].0.weight", "models[0].1.weight", "models[1].weight")
    assert found.tensor is one.weight


def test_buffers_and_owners_are_told_apart():
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    found = {
        one.names[0]: one for one in plan_tensors(Targets((model,), (optimizer,)), KeepFull(()))
    }
    assert found.keys() == {"weight", "bias", "running_mean", "running_var"}
    assert found["weight"].optimizer is optimizer
    assert found["bias"].optimizer is None
    assert [name for name, one in found.items() if one.is_buffer] == ["running_mean", "running_var"]


def test_a_buffer_keeps_its_exact_value_where_weights_do():
    model = nn.BatchNorm1d(2)
    buffer = next(one for one in plan_tensors(Targets((model,), ()), KeepFull(())) if one.is_buffer)
    kept = {
        master: TensorRule(Level.O2, torch.bfloat16, "", master).row(buffer).master
        for master in Master
        if master is not Master.AUTO
    }
    assert {master for master, exact in kept.items() if exact} == {Master.FLOAT32, Master.SPLIT}
