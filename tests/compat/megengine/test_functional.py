"""`megengine.functional`: losses against torch's."""

import pytest
import torch

import mezzo.compat.megengine.functional as F
from mezzo.compat.megengine import amp

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
LABELS = torch.tensor([2, 1], dtype=torch.int32)


@pytest.mark.parametrize("smooth", [0.0, 0.1], ids=["plain", "smooth"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("labels", [torch.int32, torch.int64], ids=str)
def test_cross_entropy_equals_torchs_for_any_integer_labels(smooth, reduction, labels):
    expected = torch.nn.functional.cross_entropy(
        LOGITS, LABELS.long(), label_smoothing=smooth, reduction=reduction
    )
    assert torch.allclose(
        F.nn.cross_entropy(LOGITS, LABELS.to(labels), label_smooth=smooth, reduction=reduction),
        expected,
    )


def test_cross_entropy_of_probabilities():
    probabilities = LOGITS.softmax(1)
    expected = torch.nn.functional.cross_entropy(LOGITS, LABELS.long(), label_smoothing=0.2)
    assert torch.allclose(
        F.loss.cross_entropy(probabilities, LABELS, with_logits=False, label_smooth=0.2), expected
    )


def test_cross_entropy_along_another_axis():
    images = torch.randn(2, 4, 4, 3)
    labels = torch.randint(3, (2, 4, 4), dtype=torch.int32)
    expected = torch.nn.functional.cross_entropy(images.movedim(-1, 1), labels.long())
    assert torch.allclose(F.nn.cross_entropy(images, labels, axis=3), expected)


def test_large_logits_do_not_overflow():
    assert (
        F.nn.cross_entropy(
            torch.tensor([[1000.0, 0.0]]), torch.tensor([0], dtype=torch.int32)
        ).item()
        == 0.0
    )


def test_16_bit_logits_give_a_float32_loss_and_16_bit_gradients():
    logits = LOGITS.half().requires_grad_()
    with amp.autocast():
        loss = F.nn.cross_entropy(logits, LABELS)
    loss.backward()
    assert (loss.dtype, logits.grad.dtype) == (torch.float32, torch.float16)


def test_labels_of_the_wrong_shape_raise_as_in_megengine():
    with pytest.raises(
        AssertionError,
        match="target ndim must be one less than input ndim; input_ndim=2 target_ndim=2",
    ):
        F.nn.cross_entropy(LOGITS, LABELS.reshape(2, 1))


def test_other_losses_equal_megengines_values():
    pred, label = torch.tensor([3.0, 3.0, 3.0, 3.0]), torch.tensor([2.0, 8.0, 6.0, 1.0])
    assert F.nn.l1_loss(pred, label).item() == 2.75
    assert F.nn.square_loss(pred, label).item() == 9.75
    assert round(F.nn.binary_cross_entropy(torch.zeros(1, 2), torch.ones(1, 2)).item(), 4) == 0.6931
    assert (
        round(
            F.nn.binary_cross_entropy(
                torch.full((1, 2), 0.5), torch.ones(1, 2), with_logits=False
            ).item(),
            4,
        )
        == 0.6931
    )
    pred, label = (
        torch.tensor([[0.5, -0.5, 0.1], [-0.6, 0.7, 0.8]]),
        torch.tensor([[1.0, -1, -1], [-1, 1, 1]]),
    )
    assert F.nn.hinge_loss(pred, label).item() == pytest.approx(1.5)
    assert F.nn.hinge_loss(pred, label, norm="L2").item() == pytest.approx(
        0.5 * (0.25 + 0.25 + 1.21 + 0.16 + 0.09 + 0.04)
    )


def test_unknown_options_are_rejected():
    with pytest.raises(AssertionError, match="norm must be L1 or L2, got 'L3'"):
        F.nn.hinge_loss(LOGITS, LOGITS, norm="L3")
    with pytest.raises(ValueError, match=r"reduction 'average'.*mean, sum, none"):
        F.nn.l1_loss(LOGITS, LOGITS, reduction="average")
