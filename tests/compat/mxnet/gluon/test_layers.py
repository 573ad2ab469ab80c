"""`gluon.nn`: the meaning of arguments that differ from torch's."""

import pytest
import torch

import mezzo
from mezzo.compat.mxnet import amp, autograd, nd
from mezzo.compat.mxnet.gluon import nn


def test_dense_flattens_unless_it_should_not():
    data = torch.ones(2, 3, 4)
    assert nn.Dense(5)(data).shape == (2, 5)
    assert nn.Dense(5, flatten=False)(data).shape == (2, 3, 5)
    layer = nn.Dense(5, in_units=12, use_bias=False, activation="relu")
    assert layer.weight.shape == (5, 12)
    assert layer.bias is None
    assert layer(data).min() >= 0


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv1D(4, 3, strides=2), (2, 3, 9), (2, 4, 4)),
        (nn.Conv2D(6, (3, 3), padding=1, groups=3), (2, 3, 8, 8), (2, 6, 8, 8)),
        (nn.Conv2D(4, 3, dilation=2, in_channels=3), (2, 3, 8, 8), (2, 4, 4, 4)),
        (nn.Conv3D(4, 1), (2, 3, 2, 2, 2), (2, 4, 2, 2, 2)),
        (nn.Conv2DTranspose(4, 2, strides=2, output_padding=1), (1, 3, 4, 4), (1, 4, 9, 9)),
        (nn.MaxPool2D(3, 2, 1), (1, 1, 8, 8), (1, 1, 4, 4)),
        (nn.AvgPool2D(ceil_mode=True), (1, 1, 5, 5), (1, 1, 3, 3)),
        (nn.GlobalAvgPool2D(), (2, 3, 4, 4), (2, 3, 1, 1)),
        (nn.GlobalMaxPool2D(), (2, 3, 4, 4), (2, 3, 1, 1)),
        (nn.Flatten(), (2, 3, 4), (2, 12)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Block) else "",
)
def test_layers_infer_channels_and_give_the_shapes_of_gluon(layer, shape, expected):
    assert layer(torch.ones(shape)).shape == expected


def test_batch_norm_has_the_momentum_of_mxnet():
    layer = nn.BatchNorm(momentum=0.75, epsilon=1e-3)
    data = torch.tensor([[0.0], [2.0]])
    with autograd.record():
        normalized = layer(data)
    assert layer.running_mean.tolist() == [0.25]
    assert normalized.flatten().tolist() == pytest.approx([-0.9995, 0.9995], abs=1e-4)
    assert layer.eps == 1e-3


def test_batch_norm_fixes_scale_and_center():
    layer = nn.BatchNorm(scale=False, center=False, in_channels=2)
    assert not layer.weight.requires_grad
    assert not layer.bias.requires_grad
    assert layer.weight.tolist() == [1.0, 1.0]


def test_batch_norm_with_global_statistics_does_not_change_them():
    layer = nn.BatchNorm(use_global_stats=True, in_channels=1)
    with autograd.record():
        assert torch.allclose(layer(torch.full((2, 1), 3.0)), torch.tensor(3.0), atol=1e-4)
    assert layer.running_mean.tolist() == [0.0]


def test_batch_norm_takes_any_number_of_dimensions():
    for shape in ((4, 2), (4, 2, 3), (4, 2, 3, 3), (4, 2, 3, 3, 3)):
        assert nn.BatchNorm()(torch.ones(shape)).shape == shape


def test_layer_norm_infers_its_size():
    layer = nn.LayerNorm(epsilon=1e-6, center=False)
    data = nd.array([[1, 3]])
    assert layer(data).asnumpy().tolist() == [pytest.approx([-1.0, 1.0], abs=1e-4)]
    assert layer.weight.shape == (2,)
    assert not layer.bias.requires_grad
    assert nn.LayerNorm(in_channels=3).weight.tolist() == [1.0] * 3


def test_an_embedding_takes_float_indices():
    layer = nn.Embedding(3, 2, weight_initializer="ones")
    assert layer(nd.array([0, 2])).asnumpy().tolist() == [[1, 1], [1, 1]]


def test_dropout_drops_inside_record_only():
    layer, data = nn.Dropout(0.5), nd.ones((1000,))
    assert layer(data).min().asscalar() == 1
    with autograd.record():
        assert layer(data).min().asscalar() == 0
    with autograd.record(train_mode=False):
        assert layer(data).min().asscalar() == 1


def test_activations():
    data = nd.array([-2, 2])
    assert nn.Activation("relu")(data).asnumpy().tolist() == [0, 2]
    assert nn.LeakyReLU(0.5)(data).asnumpy().tolist() == [-1, 2]
    assert nn.ELU()(data)[1].item() == 2
    assert nn.GELU()(data)[1].item() == pytest.approx(1.954, abs=1e-3)
    assert "relu" in repr(nn.Activation("relu"))
    with pytest.raises(ValueError, match=r"Unknown act_type 'foo'. Choose one of: relu, sigmoid"):
        nn.Activation("foo")


def test_functions_as_layers():
    data = nd.array([-2, 2])
    assert nn.Lambda("relu")(data).asnumpy().tolist() == [0, 2]
    assert nn.Lambda(lambda x: x + 1)(data).asnumpy().tolist() == [-1, 3]
    assert nn.HybridLambda("relu")(data).asnumpy().tolist() == [0, 2]
    assert nn.HybridLambda(lambda F, x: F.square(x))(data).sum().asscalar() == 8  # noqa: N803


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2D(1, 1, layout="NHWC"), "layout='NHWC' is not supported. Use NCHW"),
        (lambda: nn.MaxPool2D(layout="NHWC"), "layout='NHWC' is not supported"),
        (lambda: nn.BatchNorm(axis=3), r"BatchNorm\(axis=3\) is not supported"),
        (lambda: nn.LayerNorm(axis=1), r"LayerNorm\(axis=1\) is not supported"),
        (lambda: nn.Dropout(0.5, axes=(1,)), r"Dropout\(axes=\(1,\)\) is not supported"),
    ],
)
def test_unsupported_arguments_say_what_to_use(make, message):
    with pytest.raises(mezzo.UnsupportedError, match=message):
        make()


def test_a_float16_convolution_on_a_cpu_rounds_inputs_and_result():
    torch.manual_seed(0)
    layer, x = nn.Conv2D(8, 3, in_channels=4), torch.randn(2, 4, 6, 6, requires_grad=True)
    layer.initialize()
    with amp.init():
        result = layer(x)
    assert result.dtype is torch.float16
    exact = [one.detach().half().double() for one in (x, layer.weight, layer.bias)]
    expected = torch.nn.functional.conv2d(*[one.requires_grad_() for one in exact])
    assert (result.double() - expected).abs().max() <= 2**-11 * expected.abs().max()
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(layer.weight.grad.double(), exact[1].grad, rtol=2e-3, atol=2e-2)
    with amp.init(fp32_ops=["Convolution"]):
        assert layer(x).dtype is torch.float32
