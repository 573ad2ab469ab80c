"""`SSDMultiBoxLoss`: hard negative mining, and losses that are divided by the positives."""

import pytest
import torch
from torch.nn import functional

from mezzo.compat.gluoncv.loss import SSDMultiBoxLoss
from mezzo.compat.mxnet import nd
from mezzo.compat.mxnet._ndarray import NDArray


def reference(scores, boxes, classes, positions, ratio=3.0, rho=1.0, min_negatives=0):
    """Compute the loss of one sample with loops, undivided."""
    losses = functional.cross_entropy(scores, classes.long(), reduction="none")
    positive = [i for i in range(len(classes)) if classes[i] > 0]
    negative = sorted(set(range(len(classes))) - set(positive), key=lambda i: -losses[i].item())
    used = positive + negative[: max(int(ratio * len(positive)), min_negatives)]
    box = functional.huber_loss(boxes[positive], positions[positive], reduction="sum", delta=rho)
    return losses[used].sum(), box / rho


@pytest.mark.parametrize("options", [{}, {"negative_mining_ratio": 1}, {"min_hard_negatives": 9}])
def test_losses_equal_those_of_a_loop(options):
    torch.manual_seed(0)
    scores, boxes = torch.randn(2, 12, 4), torch.randn(2, 12, 4) * 2
    classes = torch.randint(4, (2, 12)) * (torch.rand(2, 12) < 0.2)
    positions = torch.randn(2, 12, 4)
    sums, class_losses, box_losses = SSDMultiBoxLoss(**options)(
        scores, boxes, classes.float(), positions
    )
    count = (classes > 0).sum()
    assert count > 0
    ratio = options.get("negative_mining_ratio", 3.0)
    minimum = options.get("min_hard_negatives", 0)
    for i in range(2):
        expected = reference(
            scores[i], boxes[i], classes[i], positions[i], ratio, min_negatives=minimum
        )
        assert class_losses[0][i].item() == pytest.approx((expected[0] / count).item(), rel=1e-5)
        assert box_losses[0][i].item() == pytest.approx((expected[1] / count).item(), rel=1e-5)
    assert torch.allclose(sums[0], class_losses[0] + box_losses[0])


def test_positives_are_counted_over_all_contexts():
    scores, boxes = nd.zeros((1, 4, 2)), nd.zeros((1, 4, 4))
    one, three = nd.array([[1, 0, 0, 0]]), nd.array([[1, 1, 1, 0]])
    _, class_losses, _ = SSDMultiBoxLoss()([scores] * 2, [boxes] * 2, [one, three], [boxes] * 2)
    # Each sample uses all four anchors; both are divided by four positives.
    assert [loss.asscalar() for loss in class_losses] == pytest.approx([0.6931, 0.6931], abs=1e-3)
    assert all(isinstance(loss, NDArray) for loss in class_losses)


def test_a_batch_without_positives_has_loss_0_and_gradients():
    scores = torch.randn(1, 4, 2, requires_grad=True)
    boxes = torch.zeros(1, 4, 4, requires_grad=True)
    sums, _, _ = SSDMultiBoxLoss()([scores], [boxes], [torch.zeros(1, 4)], [torch.zeros(1, 4, 4)])
    assert sums[0].item() == 0.0
    sums[0].sum().backward()
    assert scores.grad.abs().max() == 0.0
    assert boxes.grad.abs().max() == 0.0


def test_box_loss_is_weighted_and_smooth():
    loss = SSDMultiBoxLoss(rho=2.0, lambd=0.5)
    boxes = torch.tensor([[[1.0, 0, 0, 0], [3.0, 0, 0, 0]]])
    sums, classes, box = loss(
        torch.zeros(1, 2, 2), boxes, torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2, 4)
    )
    assert box[0].item() == pytest.approx((0.25 + 2.0) / 2)
    assert sums[0].item() == pytest.approx(classes[0].item() + 0.5 * box[0].item())


def test_lists_of_different_lengths_say_what_to_pass():
    with pytest.raises(
        ValueError, match=r"different lengths .*\[1, 2, 1, 1\]. Pass one array of each"
    ):
        SSDMultiBoxLoss()([0], [0, 0], [0], [0])
