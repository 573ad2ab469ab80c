"""Passes that change what a captured graph cannot follow are not captured."""

from __future__ import annotations

import pytest
import torch
from support.recorded_graphs import capture_passes, record_graphs
from torch import nn
from torch.nn import functional as F

import mezzo


@pytest.fixture(autouse=True)
def _recorded_graphs(monkeypatch):
    record_graphs(monkeypatch)


class State:
    """Holds a tensor."""

    mean: torch.Tensor


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.rate, self.size = 1.0, 0
        self.register_buffer("mean", torch.zeros(4))
        self.table = {"mean": torch.zeros(4)}
        self.pairs = [(torch.zeros(4), torch.ones(4)), (torch.zeros(4), torch.ones(4))]
        self.state = State()
        self.state.mean = torch.zeros(4)

    def forward(self, x):
        return self.layer(self.change(x))


class Annealed(Changing):
    def change(self, x):
        self.rate *= 0.9
        return self.rate * x


class NewMemory(Changing):
    def change(self, x):
        self.mean.data = 0.9 * self.mean.data + x.mean(0)
        return x - self.mean


class InTable(Changing):
    def change(self, x):
        self.table["mean"] = 0.9 * self.table["mean"] + x.mean(0)
        return x - self.table["mean"]


class NewTable(Changing):
    def change(self, x):
        self.table = {"mean": 0.9 * self.table["mean"] + x.mean(0)}
        return x - self.table["mean"]


class InPairs(Changing):
    def change(self, x):
        self.pairs = [(second, 0.9 * first + x.mean(0)) for first, second in self.pairs]
        return x - self.pairs[0][1] - self.pairs[1][0]


class InObject(Changing):
    def change(self, x):
        self.state.mean = 0.9 * self.state.mean + x.mean(0)
        return x - self.state.mean


class Sized(Changing):
    """Assigns a number of each kind of inputs."""

    def change(self, x):
        self.size = len(x)
        return x / self.size


class Features(Changing):
    """Keeps results of each pass, and reads none of the pass before."""

    def change(self, x):
        self.table["mean"], self.table[f"of {len(x)}"] = x.mean(0), self.layer(x)
        return x - self.table["mean"]


def train(model, *, capture, between=lambda _: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O1", capture=False)
    if capture:
        capture_passes(step)
    generator, losses = torch.Generator().manual_seed(0), []
    for number in range(16):
        size = 5 - number % 2
        losses.append(step(torch.randn(size, 4, generator=generator), torch.ones(size, 4)))
        between(model)
    return step, torch.stack(losses)


REFUSED = {
    Annealed: "changes the number 'rate'",
    NewMemory: "replaces the memory of 'mean'",
    InTable: "replaces tensors in the dict 'table'",
    NewTable: "replaces tensors in the dict 'table'",
    InPairs: "replaces tensors in the list 'pairs'",
    InObject: "replaces tensors in the State 'state'",
}


@pytest.mark.parametrize(("model_class", "reason"), REFUSED.items())
def test_such_a_pass_runs_eagerly_from_what_was_there_before_the_capture(model_class, reason):
    captured, eager = model_class(), model_class()
    with pytest.warns(UserWarning, match=reason):
        step, losses = train(captured, capture=True)
    assert reason in step.eager_reason
    assert torch.equal(losses, train(eager, capture=False)[1])
    assert captured.rate == eager.rate
    assert torch.equal(captured.mean, eager.mean)
    assert torch.equal(captured.table["mean"], eager.table["mean"])
    assert torch.equal(captured.pairs[0][1], eager.pairs[0][1])
    assert torch.equal(captured.state.mean, eager.state.mean)


@pytest.mark.parametrize("model_class", [Sized, Features])
def test_what_depends_on_the_call_only_is_captured(model_class):
    step, losses = train(model_class(), capture=True)
    assert step.captured
    assert torch.equal(losses, train(model_class(), capture=False)[1])


def test_other_code_may_change_numbers_between_captures():
    def between(model):
        model.size += 1

    step, _ = train(Features(), capture=True, between=between)
    assert step.captured
