import pytest
import torch

from mezzo.compat.oneflow.nn.functional import cross_entropy

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
EXPECTED = torch.nn.functional.cross_entropy(LOGITS, torch.tensor([2, 1]))


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_classes_in_a_row_or_a_column(shape, dtype):
    assert torch.equal(
        cross_entropy(LOGITS, torch.tensor([2, 1], dtype=dtype).reshape(shape)), EXPECTED
    )


def test_classes_of_images_with_a_channel():
    images, classes = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 1, 4, 4))
    assert torch.equal(
        cross_entropy(images, classes), torch.nn.functional.cross_entropy(images, classes[:, 0])
    )


def test_probabilities_are_left_as_they_are():
    assert torch.equal(
        cross_entropy(LOGITS[:, :1], torch.ones(2, 1)),
        torch.nn.functional.cross_entropy(LOGITS[:, :1], torch.ones(2, 1)),
    )


def test_torchs_own_arguments_arrive():
    assert cross_entropy(LOGITS, torch.tensor([[2], [1]]), reduction="none").shape == (2,)
