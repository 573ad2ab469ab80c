import pytest
import torch
from torch.nn import functional as F

from mezzo.compat.mxnet import nd

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
LABELS = torch.tensor([2.0, 1.0])


def gradient_of(layer, data, *arguments, **words):
    given = data.clone().requires_grad_()
    out = layer(given, *arguments, **words)
    # Whatever comes in is ignored.
    (out * 123.0).mean().backward()
    return out.detach(), given.grad


def torchs(loss, data):
    given = data.clone().requires_grad_()
    loss(given).backward()
    return given.grad


def test_softmax_sends_back_the_gradient_of_its_cross_entropy():
    out, gradient = gradient_of(nd.SoftmaxOutput, LOGITS, LABELS)
    assert torch.equal(out, LOGITS.softmax(1))
    assert torch.allclose(
        gradient,
        torchs(lambda x: F.cross_entropy(x, LABELS.long(), reduction="sum"), LOGITS),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("normalization", "divisor"), [("null", 1.0), ("batch", 2.0), ("valid", 1.0)]
)
def test_softmax_normalizes_by_samples_and_leaves_ignored_ones_out(normalization, divisor):
    labels = torch.tensor([2.0, -1.0])
    _, gradient = gradient_of(
        nd.SoftmaxOutput,
        LOGITS,
        labels,
        use_ignore=True,
        normalization=normalization,
        grad_scale=3.0,
    )
    expected = torchs(
        lambda x: F.cross_entropy(x, labels.long(), ignore_index=-1, reduction="sum"), LOGITS
    )
    assert torch.allclose(gradient, 3.0 * expected / divisor, atol=1e-6)


def test_softmax_smooths_labels_over_the_other_classes():
    _, gradient = gradient_of(nd.SoftmaxOutput, LOGITS, LABELS, smooth_alpha=0.2)
    target = torch.full((2, 3), 0.1)
    target[0, 2] = target[1, 1] = 0.8
    assert torch.allclose(
        gradient, torchs(lambda x: F.cross_entropy(x, target, reduction="sum"), LOGITS), atol=1e-6
    )


def test_the_incoming_gradient_counts_if_it_is_to():
    given = LOGITS.clone().requires_grad_()
    incoming = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    nd.SoftmaxOutput(given, LABELS, out_grad=True).backward(incoming)
    assert torch.allclose(given.grad, gradient_of(nd.SoftmaxOutput, LOGITS, LABELS)[1] * incoming)


def test_softmax_over_the_channels_of_images():
    images, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    out, gradient = gradient_of(nd.SoftmaxOutput, images, labels.float(), multi_output=True)
    assert torch.allclose(out, images.softmax(1))
    assert torch.allclose(
        gradient, torchs(lambda x: F.cross_entropy(x, labels, reduction="sum"), images), atol=1e-6
    )


@pytest.mark.parametrize("preserve", [True, False], ids=["kept", "flattened"])
def test_softmax_of_more_dimensions(preserve):
    data = torch.randn(2, 3, 4)
    labels = torch.randint(4, (2, 3)) if preserve else torch.randint(12, (2,))
    out, gradient = gradient_of(nd.SoftmaxOutput, data, labels.float(), preserve_shape=preserve)
    flat = data.reshape(-1, 4) if preserve else data.flatten(1)
    assert torch.allclose(out, flat.softmax(1).reshape(data.shape))
    expected = torchs(lambda x: F.cross_entropy(x, labels.flatten(), reduction="sum"), flat)
    assert torch.allclose(gradient, expected.reshape(data.shape), atol=1e-6)


def test_regressions_send_back_differences_divided_by_the_numbers_of_a_sample():
    data, label = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[0.0, 4.0], [3.0, 1.0]])
    out, gradient = gradient_of(nd.LinearRegressionOutput, data, label, grad_scale=2.0)
    assert torch.equal(out, data)
    assert torch.equal(gradient, data - label)
    assert torch.equal(
        gradient_of(nd.MAERegressionOutput, data, label)[1], torch.sign(data - label) / 2
    )
    out, gradient = gradient_of(nd.LogisticRegressionOutput, data, label)
    assert torch.equal(out, data.sigmoid())
    assert torch.allclose(gradient, (data.sigmoid() - label) / 2)


def test_labels_in_a_row_serve_outputs_in_a_column():
    _, gradient = gradient_of(nd.LinearRegressionOutput, torch.ones(3, 1), torch.zeros(3))
    assert torch.equal(gradient, torch.ones(3, 1))


def test_16_bit_data_are_raised_to_float32_and_get_16_bit_gradients():
    out, gradient = gradient_of(nd.SoftmaxOutput, LOGITS.half(), LABELS)
    assert (out.dtype, gradient.dtype) == (torch.float32, torch.float16)


def test_an_unknown_normalization_is_refused():
    with pytest.raises(
        ValueError, match=r"normalization='mean'. Choose one of: null, batch, valid"
    ):
        nd.SoftmaxOutput(LOGITS, LABELS, normalization="mean")


@pytest.mark.parametrize("layer", nd.__all__)
def test_a_layer_may_be_named(layer):
    made = getattr(nd, layer)
    assert torch.equal(
        made(
            data=torch.zeros(2, 2),
            label=torch.zeros(2, 2)[:, 0] if "Softmax" in layer else torch.zeros(2, 2),
            name="out",
        ),
        made(torch.zeros(2, 2), torch.zeros(2) if "Softmax" in layer else torch.zeros(2, 2)),
    )
