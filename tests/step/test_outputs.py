"""Outputs beside the loss: copies for the caller, copies on the host, means over several calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.containers import Fields
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.step.cuda_graph import CapturedGraph
from mezzo.step.outputs import HostOutputs, KeptOutputs, RunningMeans, split_loss

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2


def with_accuracy(logits, labels):
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy, "logits": logits, "note": "mine"}


def make_step(loss_fn=with_accuracy, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return mezzo.TrainStep(model, loss_fn, optimizer, **{"dtype": "bfloat16"} | options)


def make_function_step(make_body, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"dtype": "bfloat16"} | options
    return mezzo.train_step(models=model, optimizers=optimizer, **options)(make_body(model))


class TestOutputs:
    def test_a_call_returns_the_loss_and_trains_as_without_aux(self):
        step, plain = make_step(), make_step(F.cross_entropy)
        assert [float(step(X, Y)) for _ in range(3)] == [float(plain(X, Y)) for _ in range(3)]
        assert plain.outputs is None

    def test_they_are_the_aux_of_the_last_call(self):
        step = make_step()
        assert step.outputs is None
        step(X, Y)
        outputs = step.outputs
        assert outputs["note"] == "mine"
        assert float(outputs["accuracy"]) == float(
            (outputs["logits"].argmax(-1) == Y).float().mean()
        )
        assert step.outputs is outputs

    def test_they_are_detached_copies_that_no_later_call_changes(self):
        step = make_step(lambda logits, y: (F.cross_entropy(logits, y), logits))
        step(X, Y)
        outputs = step.outputs
        kept = outputs.clone()
        outputs.requires_grad_()
        step(X, Y)
        assert torch.equal(outputs, kept)
        assert not torch.equal(step.outputs, kept)
        assert not step.outputs.requires_grad

    def test_reading_them_late_gives_those_of_the_last_call(self):
        step = make_step()
        for x in (X, 2 * X):
            step(x, Y)
        expected = make_step()
        expected(X, Y)
        expected(2 * X, Y)
        assert torch.equal(step.outputs["logits"], expected.outputs["logits"])

    @pytest.mark.parametrize(
        ("aux", "expected"),
        [((1, 2), (1, 2)), ([{"a": (3,)}], [{"a": (3,)}]), (Fields(1, "b"), Fields(1, "b"))],
    )
    def test_aux_may_be_any_nest(self, aux, expected):
        step = make_step(lambda logits, y: (F.cross_entropy(logits, y), aux))
        step(X, Y)
        assert step.outputs == expected

    def test_several_values_after_the_loss_are_a_tuple(self):
        step = make_step(lambda logits, y: (F.cross_entropy(logits, y), 1, "two"))
        step(X, Y)
        assert step.outputs == (1, "two")

    def test_a_loss_function_may_return_a_dict_with_the_loss(self):
        step = make_step(lambda logits, y: {"loss": F.cross_entropy(logits, y), "n": 3})
        loss = step(X, Y)
        assert float(step.outputs["loss"]) == float(loss)
        assert step.outputs["n"] == 3

    def test_tensors_that_are_not_read_are_not_copied(self, monkeypatch):
        step = make_step()
        step(X, Y)
        cloned = []
        clone = torch.Tensor.clone
        monkeypatch.setattr(
            torch.Tensor, "clone", lambda one, **k: cloned.append(one.shape) or clone(one, **k)
        )
        step(X, Y)
        assert torch.Size([6, 2]) not in cloned

    def test_the_output_of_the_model_is_kept_on_request(self):
        step = make_step(F.cross_entropy, keep_outputs=True)
        step(X, Y)
        assert step.outputs.shape == (6, 2)

    def test_a_model_that_computes_its_loss_keeps_its_output_on_request(self):
        class Model(nn.Linear):
            def forward(self, x, y):
                logits = super().forward(x)
                return {"loss": F.cross_entropy(logits, y), "logits": logits}

        for keep_outputs in (True, False):
            model = Model(4, 2)
            step = mezzo.TrainStep(
                model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                dtype="bfloat16",
                keep_outputs=keep_outputs,
            )
            step(X, Y)
            if keep_outputs:
                assert step.outputs["logits"].shape == (6, 2)
            else:
                with pytest.raises(mezzo.PolicyError, match="keep_outputs=True"):
                    _ = step.outputs

    def test_a_call_that_raises_leaves_none(self):
        step = make_step()
        step(X, Y)
        with pytest.raises(RuntimeError, match="shapes"):
            step(X[:, :3], Y)
        assert step.outputs is None

    @pytest.mark.parametrize("returned", [(), ("loss", 1), [torch.ones(())], "loss", None])
    def test_a_result_without_a_loss_is_refused(self, returned):
        with pytest.raises(mezzo.PolicyError, match=f"returned {type(returned).__name__}"):
            make_step(lambda *_: returned)(X, Y)

    def test_they_work_with_accumulation_and_float16(self):
        step = make_step(dtype="float16", accumulate=2)
        for _ in range(3):
            step(X, Y)
            assert step.outputs["logits"].dtype is torch.float16


class TestFunctionSteps:
    def test_a_body_may_return_the_loss_and_aux(self):
        step = make_function_step(lambda model: lambda x, y: with_accuracy(model(x), y))
        expected = make_step()
        for _ in range(3):
            loss, aux = step(X, Y)
            assert float(loss) == float(expected(X, Y))
            assert torch.equal(aux["logits"], expected.outputs["logits"])
            assert step.outputs is aux
        assert not loss.requires_grad

    def test_a_body_may_return_a_dict_with_the_loss(self):
        step = make_function_step(
            lambda model: lambda x, y: {"loss": F.cross_entropy(model(x), y), "n": 3}
        )
        assert step(X, Y)["n"] == step.outputs["n"] == 3

    def test_a_body_that_calls_backward_may_return_anything(self):
        def make(model):
            def body(x):
                model(x).square().mean().backward()
                return "done"

            return body

        step = make_function_step(make)
        assert step(X) == step.outputs == "done"

    def test_a_body_that_returns_the_loss_alone_has_none(self):
        step = make_function_step(lambda model: lambda x: model(x).square().mean())
        step(X)
        assert step.outputs is None

    def test_means_are_those_of_its_loss_and_aux(self):
        step = make_function_step(
            lambda model: lambda x, y: with_accuracy(model(x), y), mean_over=2
        )
        returned = [step(X, Y) for _ in range(2)]
        assert step.means["loss"] == pytest.approx(sum(float(loss) for loss, _ in returned) / 2)
        assert set(step.means) == {"loss", "accuracy"}


class OverwritingGraph:
    """Stands for a captured graph: each replay overwrites its outputs."""

    def __init__(self, tensors):
        self.tensors = tensors

    def replay(self):
        for tensor in self.tensors:
            tensor.add_(1)


def test_a_replay_copies_the_loss_only_and_outputs_that_were_read_stay_valid():
    loss, logits = torch.zeros(()), torch.zeros(3)
    graph = CapturedGraph(OverwritingGraph([loss, logits]), [], (loss, KeptOutputs(logits)))
    first_loss, kept = graph.replay([])
    first = kept.copy()
    assert kept.value.data_ptr() == logits.data_ptr()
    second_loss, kept = graph.replay([])
    assert (float(first_loss), float(second_loss)) == (1, 2)
    assert (first.tolist(), kept.copy().tolist()) == ([1] * 3, [2] * 3)


def test_a_named_tuple_with_a_loss_is_its_own_aux():
    returned = SimpleNamespace(loss=torch.ones(()), logits=torch.zeros(2))
    assert split_loss(returned) == (returned.loss, returned)


class TestOnTheHost:
    def test_copies_are_ready_at_once_on_a_cpu_and_stay_valid(self):
        step = make_step()
        step(X, Y)
        pending = step.outputs_on_host()
        expected = step.outputs["logits"].clone()
        step(X, Y)
        assert pending.ready()
        assert torch.equal(pending.get()["logits"], expected)
        assert pending.get()["note"] == "mine"

    def test_a_step_without_outputs_has_none(self):
        step = make_step(F.cross_entropy)
        step(X, Y)
        assert step.outputs_on_host().get() is None

    def test_the_copies_are_the_callers_own(self):
        source = torch.ones(2)
        copies = HostOutputs([source]).get()
        source.zero_()
        assert copies[0].tolist() == [1, 1]


class TestMeans:
    def test_they_are_means_of_the_last_finished_window(self):
        step = make_step(mean_over=3)
        assert step.means == {}
        losses, accuracies = [], []
        for call in range(8):
            losses.append(float(step((call + 1) * X, Y)))
            accuracies.append(float(step.outputs["accuracy"]))
            end = (call + 1) // 3 * 3
            if end:
                expected = {
                    "loss": sum(losses[end - 3 : end]) / 3,
                    "accuracy": sum(accuracies[end - 3 : end]) / 3,
                }
                assert step.means == pytest.approx(expected)

    def test_without_aux_they_are_those_of_the_loss(self):
        step = make_step(F.cross_entropy, mean_over=1)
        loss = step(X, Y)
        assert step.means == {"loss": float(loss)}

    def test_a_single_scalar_has_a_name_too(self):
        step = make_step(
            lambda logits, y: (F.cross_entropy(logits, y), (logits.argmax(-1) == y).sum()),
            mean_over=1,
        )
        step(X, Y)
        assert step.means["outputs"] == int(step.outputs)

    def test_numbers_and_tensors_of_every_dtype_are_added(self):
        means = RunningMeans(2, torch.device("cpu"))
        for number in (1, 3):
            aux = {
                "int": torch.tensor([number]),
                "bool": torch.tensor(number > 1),
                "half": torch.tensor(number, dtype=torch.bfloat16, requires_grad=True),
                "plain": float(number),
                "matrix": torch.ones(2, 2),
                "text": "left out",
            }
            means.add(None, aux)
        assert means.read() == {"int": 2.0, "bool": 0.5, "half": 2.0, "plain": 2.0}

    def test_other_metrics_start_a_new_window(self):
        means = RunningMeans(2, torch.device("cpu"))
        for aux in ({"a": 1.0}, {"b": 2.0}, {"b": 4.0}):
            means.add(None, aux)
        assert means.read() == {"b": 3.0}

    def test_they_can_be_changed_by_the_caller(self):
        step = make_step(F.cross_entropy, mean_over=1)
        step(X, Y)
        step.means.clear()
        assert step.means

    def test_a_step_without_a_window_says_what_to_pass(self):
        with pytest.raises(mezzo.PolicyError, match="mean_over=50"):
            _ = make_step().means

    @pytest.mark.parametrize("mean_over", [0, -1, True, 1.5, "50"])
    def test_an_invalid_window_is_refused(self, mean_over):
        with pytest.raises(mezzo.PolicyError, match="number of calls"):
            make_step(mean_over=mean_over)
        with pytest.raises(mezzo.PolicyError, match="number of calls"):
            make_function_step(lambda model: model, mean_over=mean_over)
