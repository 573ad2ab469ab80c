"""Captured steps notice that modules, parameters, buffers and hooks are replaced."""

from __future__ import annotations

import pytest
import torch
from support.recorded_graphs import capture_passes, record_graphs
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import mezzo
from mezzo.step.model_structure import ModelStructure


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.more = nn.ModuleList()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        x = self.body(x - self.shift)
        for module in self.more:
            x = module(x)
        return self.head(x)


class Doubled(nn.Module):
    def forward(self, x):
        return 2.0 * x


def halve(_module, _inputs, output):
    return 0.5 * output


def set_weight(model):
    model.head.weight = nn.Parameter(torch.ones(2, 4))


def set_buffer(model):
    model.shift = torch.zeros(4)


def remove_hook(model):
    model.handle.remove()


CHANGES = {
    "a module is replaced": lambda model: setattr(model, "head", nn.Linear(4, 2, bias=False)),
    "a module is appended": lambda model: model.body.append(Doubled()),
    "the first module of a list": lambda model: model.more.append(Doubled()),
    "a parameter is replaced": set_weight,
    "a buffer is replaced": set_buffer,
    "a module is pruned": lambda model: prune.l1_unstructured(model.body[0], "weight", 0.5),
    "a module is parametrized": lambda model: parametrizations.weight_norm(model.body[0]),
    "a forward hook": lambda model: model.body.register_forward_hook(halve),
    "a hook of a parameter": lambda model: model.head.bias.register_hook(torch.zeros_like),
    "a hook is removed": remove_hook,
}


def made_model():
    model = Model()
    model.handle = model.body.register_forward_hook(lambda _module, _inputs, output: 0.9 * output)
    return model


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_once(change):
    model = made_model()
    structure = ModelStructure([model])
    assert not structure.has_changed()
    torch.manual_seed(1)
    change(model)
    assert structure.has_changed()
    assert not structure.has_changed()
    assert structure.modules == list(model.modules())


def test_a_hook_of_an_optimizer_is_noticed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    structure = ModelStructure([model], [optimizer])
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert structure.has_changed()
    handle.remove()
    assert structure.has_changed()


def test_hooks_that_are_removed_again_and_those_of_others_do_not_count():
    model = made_model()
    structure = ModelStructure([model])
    model.body.register_forward_hook(halve).remove()
    nn.Linear(2, 2).register_forward_hook(halve)
    assert not structure.has_changed()


def test_buffers_that_passes_assign_do_not_count():
    model = Model()
    structure = ModelStructure([model])
    model.shift = torch.zeros(4)
    assert not structure.has_changed({(id(model._buffers), "shift")})


def train(change, *, capture):
    model = made_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O1", capture=False)
    if capture:
        capture_passes(step)
    batches, losses = torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(0)), []
    for number, x in enumerate(batches):
        if number == 6:
            torch.manual_seed(1)
            change(model)
        losses.append(step(x, torch.ones(5, 2)))
        assert step.captured is (capture and number not in {0, 1, 2, 6, 7, 8})
    return torch.stack(losses)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_captured_step_computes_with_what_the_model_has(monkeypatch, change):
    record_graphs(monkeypatch)
    assert torch.equal(train(change, capture=True), train(change, capture=False))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_captured_inference_computes_with_what_the_model_has(monkeypatch, change):
    record_graphs(monkeypatch)
    model, x = made_model(), torch.randn(3, 4)
    evaluate, reference = (mezzo.EvalStep(model, capture=False) for _ in range(2))
    capture_passes(evaluate)
    for number in range(8):
        if number == 4:
            change(model)
        assert torch.equal(evaluate(x), reference(x))
        assert evaluate.captured is (number not in {0, 1, 4})


def test_hooks_are_not_followed_where_all_ranks_replay_alike():
    model = Model()
    structure = ModelStructure([model], with_hooks=False)
    handle = model.head.register_forward_hook(halve)
    assert not structure.has_changed()
    handle.remove()
    model.head = nn.Linear(4, 2)
    assert structure.has_changed()
