"""Output layers of `mxnet.nd` against the gradients of torch's losses."""

import pytest
import torch
from torch.nn import functional as F

from mezzo.compat.mxnet import nd

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]])
LABELS = torch.tensor([2.0, 1.0])


def output_and_gradient(layer, data, *args, **kwargs):
    data = data.clone().requires_grad_()
    out = layer(data, *args, **kwargs)
    # The incoming gradient is ignored.
    (out * 123.0).mean().backward()
    return out.detach(), data.grad


def torch_gradient(loss, data):
    data = data.clone().requires_grad_()
    loss(data).backward()
    return data.grad


def test_softmax_backward_is_the_gradient_of_the_cross_entropy():
    out, gradient = output_and_gradient(nd.SoftmaxOutput, LOGITS, LABELS)
    assert torch.equal(out, LOGITS.softmax(1))
    assert torch.allclose(
        gradient,
        torch_gradient(lambda x: F.cross_entropy(x, LABELS.long(), reduction="sum"), LOGITS),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("normalization", "divisor"), [("null", 1.0), ("batch", 2.0), ("valid", 1.0)]
)
def test_softmax_normalizes_and_ignores_samples(normalization, divisor):
    labels = torch.tensor([2.0, -1.0])
    _, gradient = output_and_gradient(
        nd.SoftmaxOutput,
        LOGITS,
        labels,
        use_ignore=True,
        normalization=normalization,
        grad_scale=3.0,
    )
    expected = torch_gradient(
        lambda x: F.cross_entropy(x, labels.long(), ignore_index=-1, reduction="sum"), LOGITS
    )
    assert torch.allclose(gradient, 3.0 * expected / divisor, atol=1e-6)


def test_softmax_smooths_labels_over_the_other_classes():
    _, gradient = output_and_gradient(nd.SoftmaxOutput, LOGITS, LABELS, smooth_alpha=0.2)
    target = torch.full((2, 3), 0.1)
    target[0, 2] = target[1, 1] = 0.8
    assert torch.allclose(
        gradient,
        torch_gradient(lambda x: F.cross_entropy(x, target, reduction="sum"), LOGITS),
        atol=1e-6,
    )


def test_out_grad_multiplies_by_the_incoming_gradient():
    logits = LOGITS.clone().requires_grad_()
    incoming = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    nd.SoftmaxOutput(logits, LABELS, out_grad=True).backward(incoming)
    assert torch.allclose(
        logits.grad, output_and_gradient(nd.SoftmaxOutput, LOGITS, LABELS)[1] * incoming
    )


def test_softmax_over_the_channels_of_images():
    images, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    out, gradient = output_and_gradient(nd.SoftmaxOutput, images, labels.float(), multi_output=True)
    assert torch.allclose(out, images.softmax(1))
    assert torch.allclose(
        gradient,
        torch_gradient(lambda x: F.cross_entropy(x, labels, reduction="sum"), images),
        atol=1e-6,
    )


@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "flattened"])
def test_softmax_of_higher_dimensions(preserve):
    data = torch.randn(2, 3, 4)
    labels = torch.randint(4, (2, 3)) if preserve else torch.randint(12, (2,))
    out, gradient = output_and_gradient(
        nd.SoftmaxOutput, data, labels.float(), preserve_shape=preserve
    )
    flat = data.reshape(-1, 4) if preserve else data.flatten(1)
    assert torch.allclose(out, flat.softmax(1).reshape(data.shape))
    expected = torch_gradient(lambda x: F.cross_entropy(x, labels.flatten(), reduction="sum"), flat)
    assert torch.allclose(gradient, expected.reshape(data.shape), atol=1e-6)


def test_regression_gradients_are_divided_by_the_size_of_a_sample():
    data, label = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[0.0, 4.0], [3.0, 1.0]])
    out, gradient = output_and_gradient(nd.LinearRegressionOutput, data, label, grad_scale=2.0)
    assert torch.equal(out, data)
    assert torch.equal(gradient, data - label)
    assert torch.equal(
        output_and_gradient(nd.MAERegressionOutput, data, label)[1], torch.sign(data - label) / 2
    )
    out, gradient = output_and_gradient(nd.LogisticRegressionOutput, data, label)
    assert torch.equal(out, data.sigmoid())
    assert torch.allclose(gradient, (data.sigmoid() - label) / 2)


def test_labels_are_reshaped_to_the_outputs():
    _, gradient = output_and_gradient(nd.LinearRegressionOutput, torch.ones(3, 1), torch.zeros(3))
    assert torch.equal(gradient, torch.ones(3, 1))


def test_16_bit_data_give_float32_outputs_and_16_bit_gradients():
    out, gradient = output_and_gradient(nd.SoftmaxOutput, LOGITS.half(), LABELS)
    assert (out.dtype, gradient.dtype) == (torch.float32, torch.float16)


def test_an_unknown_normalization_is_rejected():
    with pytest.raises(
        ValueError, match=r"normalization 'mean'. Choose one of: null, batch, valid"
    ):
        nd.SoftmaxOutput(LOGITS, LABELS, normalization="mean")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nd.SoftmaxOutput, r"\(2,\)"), (nd.LinearRegressionOutput, r"\(2, 3\)")],
    ids=["softmax", "regression"],
)
def test_labels_of_another_size_are_rejected(layer, shape):
    with pytest.raises(
        ValueError,
        match=rf"labels of shape \(4,\) for data of shape \(2, 3\). Pass labels of shape {shape}",
    ):
        layer(LOGITS, torch.zeros(4))


@pytest.mark.parametrize(
    "layer",
    [
        "LinearRegressionOutput",
        "LogisticRegressionOutput",
        "MAERegressionOutput",
        "SoftmaxOutput",
    ],
)
def test_layers_accept_a_name(layer):
    function = getattr(nd, layer)
    assert torch.equal(
        function(
            data=torch.zeros(2, 2),
            label=torch.zeros(2, 2)[:, 0] if "Softmax" in layer else torch.zeros(2, 2),
            name="out",
        ),
        function(torch.zeros(2, 2), torch.zeros(2) if "Softmax" in layer else torch.zeros(2, 2)),
    )
