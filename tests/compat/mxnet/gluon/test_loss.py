"""`gluon.loss`: one value for each sample, equal to the formulas."""

import pytest
import torch
from torch.nn import functional

from mezzo.compat.mxnet import nd
from mezzo.compat.mxnet._ndarray import NDArray
from mezzo.compat.mxnet.gluon import loss

PRED = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])


def test_softmax_cross_entropy_takes_numbers_or_probabilities_of_classes():
    labels = torch.tensor([2.0, 1.0])
    expected = functional.cross_entropy(PRED, labels.long(), reduction="none")
    assert torch.allclose(loss.SoftmaxCrossEntropyLoss()(PRED, labels), expected)
    one_hot = functional.one_hot(labels.long(), 3).float()
    assert torch.allclose(loss.SoftmaxCELoss(sparse_label=False)(PRED, one_hot), expected)
    log_probabilities = PRED.log_softmax(-1)
    from_logits = loss.SoftmaxCELoss(from_logits=True, weight=2.0)
    assert torch.allclose(from_logits(log_probabilities, labels), 2 * expected)


def test_softmax_cross_entropy_averages_over_positions_and_weights_samples():
    pred, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    expected = functional.cross_entropy(pred, labels, reduction="none").mean((1, 2))
    result = loss.SoftmaxCrossEntropyLoss(axis=1)(pred, labels)
    assert torch.allclose(result, expected)
    weights = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
    weighted = loss.SoftmaxCrossEntropyLoss(axis=1)(pred, labels, weights)
    assert torch.allclose(weighted, expected * torch.tensor([0.0, 1.0]))


def test_l2_is_half_the_squared_error_and_labels_are_reshaped():
    label = torch.zeros(6)
    assert loss.L2Loss()(PRED, label).tolist() == pytest.approx([0.875, 5 / 3])
    assert loss.L1Loss()(PRED, label).tolist() == pytest.approx([3.5 / 3, 4 / 3])
    assert loss.HuberLoss()(PRED, label).tolist() == pytest.approx([2.125 / 3, 1.0])


def test_binary_cross_entropy_takes_logits_or_probabilities():
    label = torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    expected = functional.binary_cross_entropy_with_logits(PRED, label, reduction="none").mean(1)
    assert torch.allclose(loss.SigmoidBCELoss()(PRED, label), expected)
    from_sigmoid = loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=True)
    assert torch.allclose(from_sigmoid(PRED.sigmoid(), label), expected)
    ones = torch.ones(3)
    assert torch.allclose(from_sigmoid(PRED.sigmoid(), label, None, ones), expected)


def test_the_divergence_of_a_distribution_from_itself_is_0():
    probabilities = PRED.softmax(-1)
    for from_logits, pred in ((False, PRED), (True, PRED.log_softmax(-1))):
        result = loss.KLDivLoss(from_logits=from_logits)(pred, probabilities)
        assert torch.allclose(result, torch.zeros(2), atol=1e-6)


def test_losses_of_arrays_are_arrays():
    result = loss.L2Loss()(nd.ones((2, 3)), nd.zeros((2, 3)))
    assert isinstance(result, NDArray)
    assert result.asnumpy().tolist() == [0.5, 0.5]
