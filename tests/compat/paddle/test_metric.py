"""`paddle.metric`: metrics of `paddle.Model`."""

from __future__ import annotations

import pytest
import torch

from mezzo.compat.paddle.metric import Accuracy, Metric

PRED = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])


@pytest.mark.parametrize(
    "label",
    [torch.tensor([2, 1, 0]), torch.tensor([[2], [1], [0]]), torch.eye(3)[[2, 1, 0]]],
    ids=["numbers", "column", "one-hot"],
)
def test_accuracy_is_the_share_of_correct_top_predictions(label):
    accuracy = Accuracy()
    assert accuracy.update(accuracy.compute(PRED, label)) == pytest.approx(1 / 3)


def test_accuracy_accumulates_batches_until_reset():
    accuracy = Accuracy()
    accuracy.update(accuracy.compute(PRED, torch.tensor([2, 0, 1])))
    accuracy.update(accuracy.compute(PRED[:1], torch.tensor([0])))
    assert accuracy.accumulate() == 0.75
    accuracy.reset()
    assert accuracy.accumulate() == 0.0


def test_several_top_k_give_several_numbers():
    accuracy = Accuracy(topk=(1, 2), name="hit")
    accuracy.update(accuracy.compute(PRED, torch.tensor([2, 1, 2])))
    assert accuracy.name() == ["hit_top1", "hit_top2"]
    assert accuracy.accumulate() == pytest.approx([1 / 3, 1.0])


def test_a_custom_metric_receives_outputs_and_labels():
    class Mean(Metric):
        def __init__(self):
            self.reset()

        def reset(self):
            self.values = []

        def update(self, pred, _label):
            self.values.append(float(pred.mean()))

        def accumulate(self):
            return sum(self.values) / len(self.values)

        def name(self):
            return "mean"

    mean = Mean()
    mean.update(*mean.compute(torch.ones(2), torch.zeros(2)))
    assert mean.accumulate() == 1.0
