"""What mezzo has bound to an optimizer is found by those who ask, and by nobody else."""

from __future__ import annotations

import torch

import mezzo
from mezzo.scaling.loss_scales import binding_of


def test_an_optimizer_is_bound_while_its_model_is_decorated():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert binding_of(optimizer) is None
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert binding_of(optimizer).reads_on_device
    mezzo.undecorate(model)
    assert binding_of(optimizer) is None


def test_a_step_over_stand_ins_reads_scheduled_values_on_the_host_and_checks_nothing_itself():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.RMSprop(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    bound = binding_of(optimizer)
    assert not bound.reads_on_device
    assert not bound.check(lambda: torch.ones(()), {}, None)
