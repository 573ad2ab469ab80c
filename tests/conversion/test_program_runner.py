"""Calling a program directly gives what torch's module of it gives."""

import pytest
import torch
from support.graphs import HALF, Calls, tensors
from support.zoo import ZOO
from torch import nn

import mezzo
from mezzo.conversion.program_runner import ProgramRunner

X = torch.randn(3, 4)


class Scaled(nn.Linear):
    def forward(self, x, factor):
        return super().forward(x) * factor


def _runner(model, args, kwargs=None, **words):
    converted = mezzo.convert(model, args, kwargs, dtype=HALF, **words)
    return converted, converted._runners[0]


def _refuse(*_, **__):
    pytest.fail("the module was called")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ["mobilenet", "bert", "lstm", "branching"])
def test_the_graph_gives_what_the_module_gives(name, monkeypatch):
    animal = ZOO[name]()
    converted, runner = _runner(animal.model, animal.args)
    with torch.no_grad():
        expected = runner.module(*animal.args)
    monkeypatch.setattr(runner.module, "forward", _refuse)
    assert all(map(torch.equal, tensors(converted(*animal.args)), tensors(expected)))


def test_a_mapping_may_have_its_entries_in_any_order():
    model = Calls(lambda self, x: self.linear(x["a"]) - x["b"][0], linear=nn.Linear(4, 4))
    inputs = {"a": X, "b": [torch.ones(4)]}
    converted, _ = _runner(model, (inputs,))
    assert torch.equal(converted({"b": [torch.ones(4)], "a": X}), converted(inputs))
    assert converted({"b": [torch.ones(4).half()], "a": X.half()}).dtype is torch.float32
    with pytest.raises(mezzo.ConversionError, match="No program"):
        converted({"c": [torch.ones(4)], "a": torch.ones(4)})


def test_an_input_may_be_named_that_was_not_in_the_example():
    model = nn.Linear(4, 2)
    converted, _ = _runner(model, (X,))
    assert torch.equal(converted(input=X), converted(X))


def test_buffers_that_a_program_writes_are_the_module_s():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    converted, runner = _runner(model, (X,))
    converted(X)
    converted(X)
    assert dict(runner.module.named_buffers())["1.num_batches_tracked"] == 2


def test_guards_are_looked_at():
    converted, _ = _runner(
        Scaled(4, 4), (X, 2), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=8)}, None)
    )
    assert converted(X[:2], 2).shape == (2, 4)
    for odd in ((X, 3), (torch.randn(9, 4), 2)):
        with pytest.raises(mezzo.ConversionError, match="not what the program was converted for"):
            converted(*odd)


def test_no_weight_is_looked_up_while_it_runs(monkeypatch):
    animal = ZOO["mlp"]()
    converted, runner = _runner(animal.model, animal.args)
    converted(*animal.args)
    monkeypatch.setattr(nn.Module, "__getattr__", _refuse)
    converted(*animal.args)
    assert isinstance(runner, ProgramRunner)
