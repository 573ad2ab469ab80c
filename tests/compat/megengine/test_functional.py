"""`megengine.functional`: losses and other functions against torch's and NumPy's."""

import numpy as np
import pytest
import torch

import mezzo.compat.megengine as mge
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


X = np.arange(24, dtype="float32").reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda x: F.sum(x), lambda a: a.sum()),
        (lambda x: F.mean(x, axis=(0, 2)), lambda a: a.mean((0, 2))),
        (lambda x: F.mean(x.astype("int32")), lambda a: a.mean()),
        (lambda x: F.var(x, axis=1, keepdims=True), lambda a: a.var(1, keepdims=True)),
        (lambda x: F.std(x), lambda a: a.std()),
        (lambda x: F.max(x, axis=1), lambda a: a.max(1)),
        (lambda x: F.min(x), lambda a: a.min()),
        (lambda x: F.prod(x + 1, axis=(0, 2)), lambda a: (a + 1).prod((0, 2))),
        (lambda x: F.argmax(x), lambda a: a.argmax()),
        (lambda x: F.argmin(x, axis=1, keepdims=True), lambda a: a.argmin(1)[:, None]),
        (lambda x: F.argsort(-x), lambda a: np.argsort(-a)),
        (lambda x: F.sort(x, descending=True)[0], lambda a: -np.sort(-a)),
        (lambda x: F.topk(x, 2)[0], lambda a: a[..., :-3:-1]),
        (lambda x: F.topk(x, 2, descending=False)[1], lambda a: np.full((2, 3, 2), (0, 1))),
        (lambda x: F.topk(x, 2, kth_only=True)[0], lambda a: a[..., 2]),
        (lambda x: F.norm(x), lambda a: np.linalg.norm(a.reshape(-1))),
        (lambda x: F.normalize(x, axis=2), lambda a: a / np.linalg.norm(a, axis=2, keepdims=True)),
        (lambda x: F.cumsum(x, axis=1), lambda a: a.cumsum(1)),
        (lambda x: F.matmul(x, x, transpose_b=True), lambda a: a @ a.transpose(0, 2, 1)),
        (lambda x: F.matmul(x, x, transpose_a=True), lambda a: a.transpose(0, 2, 1) @ a),
        (lambda x: F.dot(x[0, 0], x[0, 1]), lambda a: a[0, 0] @ a[0, 1]),
        (lambda x: F.maximum(x, 5), lambda a: np.maximum(a, 5)),
        (lambda x: F.minimum(3.0, x), lambda a: np.minimum(3.0, a)),
        (lambda x: F.exp(x / 9), lambda a: np.exp(a / 9)),
        (lambda x: F.equal(x, 3), lambda a: a == 3),
        (lambda x: F.clip(x, 2, 5), lambda a: a.clip(2, 5)),
        (lambda x: F.concat([x, x], axis=1), lambda a: np.concatenate([a, a], 1)),
        (lambda x: F.stack([x, x], axis=-1), lambda a: np.stack([a, a], -1)),
        (lambda x: F.split(x, 2, axis=2)[1], lambda a: np.split(a, 2, 2)[1]),
        (lambda x: F.split(x, [1], axis=1)[1], lambda a: np.split(a, [1], 1)[1]),
        (lambda x: F.reshape(x, (4, 6)), lambda a: a.reshape(4, 6)),
        (lambda x: F.flatten(x, 1), lambda a: a.reshape(2, 12)),
        (lambda x: F.transpose(x, (2, 0, 1)), lambda a: a.transpose(2, 0, 1)),
        (lambda x: F.transpose(x[0, 0], (0, "x")), lambda a: a[0, 0][:, None]),
        (lambda x: F.swapaxes(x, 0, 2), lambda a: a.swapaxes(0, 2)),
        (lambda x: F.expand_dims(x, (0, 3)), lambda a: np.expand_dims(a, (0, 3))),
        (lambda x: F.squeeze(x[:, :1], 1), lambda a: a[:, 0]),
        (lambda x: F.broadcast_to(x[:1], (2, 3, 4)), lambda a: np.broadcast_to(a[:1], (2, 3, 4))),
        (lambda x: F.repeat(x, 2, axis=1), lambda a: a.repeat(2, 1)),
        (lambda x: F.tile(x, (1, 2, 1)), lambda a: np.tile(a, (1, 2, 1))),
        (lambda x: F.roll(x, 1, 2), lambda a: np.roll(a, 1, 2)),
        (lambda x: F.where(x > 3, x, -x), lambda a: np.where(a > 3, a, -a)),
        (lambda x: F.arange(1, 7, 2), lambda a: np.arange(1.0, 7, 2)),
        (lambda x: F.arange(3), lambda a: np.arange(3.0)),
        (lambda x: F.linspace(0, 1, 5), lambda a: np.linspace(0, 1, 5)),
        (lambda x: F.eye(2, 3), lambda a: np.eye(2, 3)),
        (lambda x: F.full(3, 2.5), lambda a: np.full(3, 2.5)),
        (lambda x: F.full_like(x, 2), lambda a: np.full_like(a, 2)),
        (lambda x: F.one_hot(mge.tensor([1], dtype="int32"), 3), lambda a: [[0, 1, 0]]),
        (lambda x: F.gather(x, 1, x[:, :1].astype("int32") * 0), lambda a: a[:, :1]),
        (lambda x: F.indexing_one_hot(x[0], mge.tensor([1, 0, 3])), lambda a: [1.0, 4.0, 11.0]),
        (lambda x: F.hswish(x - 2), lambda a: (a - 2) * np.clip(a + 1, 0, 6) / 6),
        (lambda x: F.leaky_relu(-x, 0.5), lambda a: -a / 2),
        (lambda x: F.softmax(x)[:, 0, 0], lambda a: np.exp(a)[:, 0, 0] / np.exp(a).sum(0)[0, 0]),
        (lambda x: F.logsumexp(x, (0, 1)), lambda a: np.log(np.exp(a).sum((0, 1)))),
        (lambda x: F.embedding(mge.tensor([1], dtype="int32"), x[0]), lambda a: a[0, 1:2]),
        (lambda x: F.topk_accuracy(x[0], mge.tensor([3, 3, 0], dtype="int32")), lambda a: 2 / 3),
    ],
)
def test_functions_compute_what_numpy_does(result, expected):
    np.testing.assert_allclose(result(mge.tensor(X)).numpy(), expected(X), rtol=1e-5)


def test_convolutions_accept_megengines_bias_and_pooling_leaves_padding_out():
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    bias = torch.randn(1, 3, 1, 1)
    expected = torch.nn.functional.conv2d(x, weight, bias.flatten(), padding=1)
    assert torch.equal(F.conv2d(x, weight, bias, padding=1, compute_mode="float32"), expected)
    assert F.avg_pool2d(torch.ones(1, 1, 2, 2), 3, 1, 1).unique().tolist() == [1.0]
    assert F.layer_norm(x, (4, 4), affine=False).shape == x.shape


def test_functions_follow_autocast():
    x = mge.tensor(np.ones((2, 2)), dtype="float32")
    with amp.autocast():
        assert F.matmul(x, x).dtype is F.linear(x, x).dtype is torch.float16
        assert F.exp(F.matmul(x, x)).dtype is torch.float32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: F.split(x, 3, axis=2), ValueError, "4 elements.*not divisible into 3"),
        (lambda x: F.clip(x), AssertionError, "needs lower, upper or both"),
        (lambda x: F.topk_accuracy(x[0], x[0, :, 0], 9), AssertionError, "logits have 4"),
    ],
    ids=["split", "clip", "topk_accuracy"],
)
def test_wrong_arguments_are_refused_in_plain_words(call, error, message):
    with pytest.raises(error, match=message):
        call(mge.tensor(X))
