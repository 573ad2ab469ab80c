"""Buffers are restored after a skip, and batches are counted as torch counts them."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn

from mezzo.step.module_buffers import BatchCounters, ModuleBuffers, module_modes

NAN = float("nan")


class TestBuffers:
    def model(self):
        model = nn.Sequential(nn.BatchNorm1d(3))
        model.register_buffer("constant", torch.ones(5))
        return model

    def after_one_step(self, model):
        buffers = ModuleBuffers([model])
        buffers.save("mode")
        model(torch.randn(4, 3))
        buffers.find_written()
        return buffers

    def test_only_written_buffers_are_saved(self):
        buffers = self.after_one_step(self.model())
        assert buffers.knows("mode")
        assert not buffers.knows("another mode")
        assert sum(len(snapshot._buffers) for snapshot in buffers._written["mode"]) == 3

    @pytest.mark.parametrize("skipped", [True, torch.tensor(1.0)], ids=["bool", "tensor"])
    def test_a_skipped_step_restores_them_even_from_nan(self, skipped):
        model = self.model()
        buffers = self.after_one_step(model)
        before = [buffer.clone() for buffer in model.buffers()]
        buffers.save("mode")
        model(torch.full((4, 3), NAN))
        buffers.restore(skipped)
        assert all(map(torch.equal, model.buffers(), before))

    @pytest.mark.parametrize("skipped", [False, torch.tensor(0.0)], ids=["bool", "tensor"])
    def test_a_successful_step_leaves_them(self, skipped):
        model = self.model()
        buffers = self.after_one_step(model)
        buffers.save("mode")
        model(torch.randn(4, 3))
        after = [buffer.clone() for buffer in model.buffers()]
        buffers.restore(skipped)
        assert all(map(torch.equal, model.buffers(), after))

    def test_the_first_step_in_a_mode_can_be_restored_too(self):
        model = self.model()
        before = [buffer.clone() for buffer in model.buffers()]
        self.after_one_step(model).restore(True)
        assert all(map(torch.equal, model.buffers(), before))

    def test_sparse_ones_are_constants(self):
        model = self.model()
        model.register_buffer("adjacency", torch.eye(4).to_sparse())
        buffers = self.after_one_step(model)
        buffers.restore(True)
        assert model[0].running_mean.eq(0.0).all()
        assert len(buffers.tensors) == len(list(model.buffers())) - 1

    def test_modes_are_those_of_modules_and_parameters(self):
        model = self.model()
        modules, parameters = list(model.modules()), list(model.parameters())
        modes = [module_modes(modules, parameters)]
        model.eval()
        modes.append(module_modes(modules, parameters))
        parameters[0].requires_grad_(requires_grad=False)
        modes.append(module_modes(modules, parameters))
        assert len(set(modes)) == 3


class Norms(nn.Module):
    """Norms that are called twice, once, frozen, averaging over all batches, without counter."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.frozen = (nn.BatchNorm1d(4) for _ in range(3))
        self.average = nn.BatchNorm1d(4, momentum=None)
        self.uncounted = nn.BatchNorm1d(4, track_running_stats=False)
        self.frozen.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uncounted(self.average(self.frozen(self.once(self.twice(self.twice(x))))))


class TestBatchCounters:
    def test_counters_are_those_of_torch(self):
        ours, torchs = Norms(), Norms()
        counters = BatchCounters([ours])
        for _ in range(3):
            x = torch.randn(5, 4)
            torchs(x)
            with counters.counting():
                ours(x)
        assert {name: value for name, value in ours.state_dict().items() if "num" in name} == {
            "twice.num_batches_tracked": torch.tensor(6),
            "once.num_batches_tracked": torch.tensor(3),
            "frozen.num_batches_tracked": torch.tensor(0),
            "average.num_batches_tracked": torch.tensor(3),
        }
        assert all(map(torch.equal, ours.buffers(), torchs.buffers()))

    def test_a_model_that_raises_keeps_its_counters(self):
        model = Norms()
        with pytest.raises(ValueError, match="expected"), BatchCounters([model]).counting():
            model(torch.ones(2))
        assert model.twice.num_batches_tracked.item() == 0
        assert "num_batches_tracked" not in model.twice.__dict__

    def test_a_subclass_counts_itself(self):
        class Doubling(nn.BatchNorm1d):
            def forward(self, x):
                self.num_batches_tracked.mul_(2).add_(1)
                return x

        model = Doubling(4)
        with BatchCounters([model]).counting():
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))
        assert model.num_batches_tracked.item() == 3

    def test_compiled_code_counts_without_graph_breaks_and_compiles_once(self):
        torch._dynamo.reset()
        model, graphs = Norms(), []
        model.average = nn.Identity()  # it reads its counter, which breaks the graph

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(model, backend=backend, fullgraph=True)
        counters = BatchCounters([model])
        for _ in range(4):
            with counters.counting():
                compiled(torch.ones(5, 4))
        assert len(graphs) == 1
        assert model.twice.num_batches_tracked.item() == 8
        assert model.once.num_batches_tracked.item() == 4

    def test_a_skipped_step_counts_no_batch(self):
        made = Made("cnn")
        in_steps(made, batches("cnn", 6, overflows=[2, 3]), "O1", "float16")
        assert made.model.norm.num_batches_tracked.item() == 4
