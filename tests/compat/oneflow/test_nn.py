"""Names that are torch's, and cross entropy with OneFlow's targets."""

import pytest
import torch

import mezzo.compat.oneflow as flow
from mezzo.compat.oneflow import nn
from mezzo.compat.oneflow.nn import CrossEntropyLoss, functional
from mezzo.compat.oneflow.nn.functional import cross_entropy


def test_other_names_are_those_of_torch():
    assert (flow.randn, flow.optim.SGD, flow.int64, nn.Linear, functional.relu) == (
        torch.randn,
        torch.optim.SGD,
        torch.int64,
        torch.nn.Linear,
        torch.nn.functional.relu,
    )


def test_names_of_the_dialect_take_precedence():
    assert flow.nn is nn
    assert flow.autocast is flow.amp.autocast is not torch.autocast
    assert nn.functional is functional


LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
EXPECTED = torch.nn.functional.cross_entropy(LOGITS, torch.tensor([2, 1]))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_class_targets_may_have_shape_n_or_n_by_1(shape, dtype):
    assert torch.equal(
        cross_entropy(LOGITS, torch.tensor([2, 1], dtype=dtype).reshape(shape)), EXPECTED
    )


def test_class_targets_of_images_may_have_a_channel():
    images, classes = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 1, 4, 4))
    assert torch.equal(
        cross_entropy(images, classes), torch.nn.functional.cross_entropy(images, classes[:, 0])
    )


def test_probability_targets_are_not_changed():
    assert torch.equal(
        cross_entropy(LOGITS[:, :1], torch.ones(2, 1)),
        torch.nn.functional.cross_entropy(LOGITS[:, :1], torch.ones(2, 1)),
    )


def test_cross_entropy_passes_arguments_to_torch():
    assert cross_entropy(LOGITS, torch.tensor([[2], [1]]), reduction="none").shape == (2,)


def test_the_loss_module_passes_its_arguments():
    logits, weight = torch.randn(4, 3), torch.tensor([1.0, 2.0, 3.0])
    target = torch.tensor([0, 1, 2, 0])
    kwargs = {"weight": weight, "ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    expected = torch.nn.CrossEntropyLoss(**kwargs)(logits, target)
    assert torch.equal(CrossEntropyLoss(**kwargs)(logits, target[:, None]), expected)
