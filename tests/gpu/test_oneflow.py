"""mezzo.compat.oneflow on a CUDA device: graphs are captured and train as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat.oneflow import amp
from mezzo.compat.oneflow.nn import CrossEntropyLoss, Graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Training(Graph):
    def __init__(self, model):
        super().__init__()
        self.model, self.loss_fn = model, CrossEntropyLoss()
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_amp(True)
        self.set_grad_scaler(amp.GradScaler(init_scale=2**12, growth_interval=1000))

    def build(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


class Evaluation(Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config.enable_amp(True)

    def build(self, x):
        return self.model(x)


def run(device: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).to(device)
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(64, 32, generator=generator).to(device),
        torch.ones(64, 1, dtype=torch.int64, device=device),
    )
    graph = Training(model)
    losses = [graph(x, y).item() for _ in range(12)]
    overflowing = x.clone()
    overflowing[0, 0] = float("inf")
    graph(overflowing, y)
    return graph, losses, Evaluation(model), x


def test_a_graph_is_captured_and_trains_as_on_a_cpu():
    graph, losses, _, _ = run("cuda")
    _, expected, _, _ = run("cpu")
    assert graph.mezzo_step.captured, graph.mezzo_step.eager_reason
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-2)
    assert graph.mezzo_step.scaler.get_scale() == 2**11


def test_an_evaluation_is_captured():
    _, _, evaluation, x = run("cuda")
    first = evaluation(x)
    for _ in range(4):
        assert torch.equal(evaluation(x), first)
    assert evaluation.mezzo_step.captured, evaluation.mezzo_step.eager_reason
    assert first.dtype is torch.float32
