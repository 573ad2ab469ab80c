"""Batches are counted as torch counts them, in one addition."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn

from mezzo.step.module_buffers import BatchCounters


class Net(nn.Module):
    """One norm that is called twice, one once, one that is frozen, one that averages over all batches, one that counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.frozen = (nn.BatchNorm1d(4) for _ in range(3))
        self.average, self.none = (
            nn.BatchNorm1d(4, momentum=None),
            nn.BatchNorm1d(4, track_running_stats=False),
        )
        self.frozen.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.none(self.average(self.frozen(self.once(self.twice(self.twice(x))))))


def test_counters_are_those_of_torch():
    ours, theirs = Net(), Net()
    tallies = BatchCounters([ours])
    for _ in range(3):
        x = torch.randn(5, 4)
        theirs(x)
        with tallies.counting():
            ours(x)
    assert {name: value for name, value in ours.state_dict().items() if "num" in name} == {
        "twice.num_batches_tracked": torch.tensor(6),
        "once.num_batches_tracked": torch.tensor(3),
        "frozen.num_batches_tracked": torch.tensor(0),
        "average.num_batches_tracked": torch.tensor(3),
    }
    assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


def test_a_model_that_raises_keeps_its_counters():
    model = Net()
    with pytest.raises(ValueError, match="expected"), BatchCounters([model]).counting():
        model(torch.ones(2))
    assert model.twice.num_batches_tracked.item() == 0
    assert "num_batches_tracked" not in model.twice.__dict__


def test_a_subclass_counts_by_itself():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            self.num_batches_tracked.mul_(2).add_(1)
            return x

    model = Own(4)
    with BatchCounters([model]).counting():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert model.num_batches_tracked.item() == 3


def test_compiled_code_counts_without_breaks_and_is_compiled_once():
    torch._dynamo.reset()
    model, compiled = Net(), []
    model.average = nn.Identity()  # it reads its counter, and breaks by itself

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    run, tallies = torch.compile(model, backend=backend, fullgraph=True), BatchCounters([model])
    for _ in range(4):
        with tallies.counting():
            run(torch.ones(5, 4))
    assert len(compiled) == 1
    assert (model.twice.num_batches_tracked.item(), model.once.num_batches_tracked.item()) == (8, 4)


def test_a_skipped_step_counts_no_batch():
    made = Made("cnn")
    in_steps(made, batches("cnn", 6, overflows=[2, 3]), "O1", "float16")
    assert made.model.norm.num_batches_tracked.item() == 4
