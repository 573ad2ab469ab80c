"""`mxnet.metric`: averages over updates."""

import math

import pytest
import torch

import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import metric, nd


def test_a_loss_is_averaged_over_all_its_elements():
    loss = mx.metric.Loss("CrossEntropy")
    assert math.isnan(loss.get()[1])
    loss.update(0, [nd.array([1, 2]), torch.tensor([6.0])])
    loss.update(0, nd.array([3]))
    assert loss.get() == ("CrossEntropy", 3.0)
    assert loss.get_name_value() == [("CrossEntropy", 3.0)]
    assert str(loss) == "EvalMetric: {'CrossEntropy': 3.0}"
    loss.reset()
    assert loss.num_inst == 0


def test_an_update_keeps_no_graph_and_does_not_synchronize(monkeypatch):
    loss = metric.Loss()
    weight = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch.Tensor, "item", None)
    loss.update(0, [weight * 2])
    assert all(not total.requires_grad for total in loss._sums.values())


def test_accuracy_takes_scores_or_classes():
    accuracy = metric.Accuracy()
    accuracy.update([nd.array([1, 0])], [nd.array([[0.1, 0.9], [0.2, 0.8]])])
    accuracy.update(nd.array([1, 1]), nd.array([1, 1]))
    assert accuracy.get() == ("accuracy", 0.75)
    with pytest.raises(ValueError, match=r"labels \(3,\) does not match .* \(2,\) in Accuracy"):
        accuracy.update(nd.array([1, 0, 1]), nd.array([[0.1, 0.9], [0.2, 0.8]]))
    with pytest.raises(ValueError, match="got 1 labels and 2 predictions"):
        accuracy.update(nd.array([1]), [nd.array([1]), nd.array([1])])


def test_the_other_metrics():
    labels, scores = nd.array([2, 0]), nd.array([[0.1, 0.6, 0.3], [0.1, 0.5, 0.4]])
    top = metric.TopKAccuracy(top_k=2)
    top.update(labels, scores)
    assert top.get() == ("top_k_accuracy_2", 0.5)
    entropy = metric.CrossEntropy()
    entropy.update(labels, scores)
    assert entropy.get()[1] == pytest.approx(-(math.log(0.3) + math.log(0.1)) / 2, rel=1e-5)
    for name, expected in (("mae", 2.0), ("mse", 5.0), ("rmse", math.sqrt(5))):
        made = metric.create(name)
        made.update(nd.array([0, 0]), nd.array([[1], [3]]))
        assert made.get() == (name, pytest.approx(expected))


def test_several_metrics_are_one():
    several = metric.create(["acc", metric.Loss()])
    several.add("mse")
    several.update_dict({"label": nd.array([1])}, {"pred": nd.array([1])})
    assert several.get() == (["accuracy", "loss", "mse"], [1.0, 1.0, 0.0])
    several.reset()
    assert math.isnan(several.get()[1][0])


def test_an_unknown_metric_names_the_known_ones():
    with pytest.raises(ValueError, match=r"Unknown metric 'accurcy'. .*Did you mean 'accuracy'"):
        metric.create("accurcy")
    with pytest.raises(NotImplementedError, match=r"has no update\(labels, preds\)"):
        metric.EvalMetric("mine").update(0, 0)
