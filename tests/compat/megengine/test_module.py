"""`megengine.module`: layers with MegEngine's arguments and initial values."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import mezzo.compat.megengine as mge
import mezzo.compat.megengine.functional as F
import mezzo.compat.megengine.module as M


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (lambda: M.Linear(256, 128), 256),
        (lambda: M.Conv1d(32, 64, 5), 160),
        (lambda: M.Conv2d(32, 64, 3, groups=2), 144),
        (lambda: M.Conv3d(8, 32, 3), 216),
        (lambda: M.ConvTranspose2d(64, 32, 3), 576),
    ],
    ids=["linear", "conv1d", "conv2d", "conv3d", "transposed"],
)
def test_weights_start_with_megengines_variance_and_biases_with_zero(layer, fan_in):
    torch.manual_seed(0)
    made = layer()
    assert made.weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.05)
    assert not made.bias.detach().any()
    assert isinstance(made, M.Module)
    assert isinstance(made, nn.Module)


def test_momentum_is_the_weight_of_the_old_statistics():
    norm = M.BatchNorm2d(1, momentum=0.75)
    norm(torch.full((1, 1, 2, 2), 4.0))
    assert norm.running_mean.item() == 1.0


def test_a_frozen_norm_keeps_its_statistics_and_has_no_gradients():
    norm = M.BatchNorm2d(1, freeze=True)
    norm.train()
    norm(torch.full((1, 1, 2, 2), 4.0))
    assert norm.running_mean.item() == 0.0
    assert not any(parameter.requires_grad for parameter in norm.parameters())


@pytest.mark.parametrize(
    ("layer", "same"),
    [
        (M.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        (M.AvgPool2d(3, 2, 1, mode="average"), nn.AvgPool2d(3, 2, 1)),
        (M.MaxPool2d(2, name="pool"), nn.MaxPool2d(2)),
        (M.AdaptiveAvgPool2d(oshp=2), nn.AdaptiveAvgPool2d(2)),
        (M.AdaptiveMaxPool2d((1, 1)), nn.AdaptiveMaxPool2d(1)),
        (M.Softmax(), nn.Softmax(1)),
        (M.Softmax(axis=-1), nn.Softmax(-1)),
        (M.LeakyReLU(0.1), nn.LeakyReLU(0.1)),
        (M.PReLU(), nn.PReLU()),
        (M.GELU(), nn.GELU()),
        (M.SiLU(), nn.SiLU()),
        (M.Sigmoid(), nn.Sigmoid()),
        (M.Identity(), nn.Identity()),
        (M.Dropout(), nn.Dropout(0.0)),
        (M.GroupNorm(2, 4), nn.GroupNorm(2, 4)),
        (M.InstanceNorm(4), nn.InstanceNorm2d(4)),
        (M.LayerNorm((6, 6)), nn.LayerNorm((6, 6))),
        (M.PixelShuffle(2), nn.PixelShuffle(2)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_compute_what_torchs_do(layer, same):
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(layer(x), same(x))


def test_a_sequential_has_the_keys_of_an_ordered_dict_and_slices():
    layers = M.Sequential(OrderedDict(fc0=M.Linear(4, 3), act=M.ReLU(), fc1=M.Linear(3, 2)))
    assert [name for name, _ in layers.named_children()] == ["fc0", "act", "fc1"]
    assert layers[:2](torch.ones(1, 4)).shape == (1, 3)


def test_an_embedding_takes_any_integers_and_refuses_what_megengine_refuses():
    table = M.Embedding(4, 2, initial_weight=np.ones((4, 2), "float32"), freeze=True)
    assert table(mge.tensor([1, 2], dtype="int32")).numpy().tolist() == [[1.0, 1.0]] * 2
    assert not table.weight.requires_grad
    with pytest.raises(ValueError, match=r"Use torch.nn.Embedding"):
        M.Embedding(4, 2, padding_idx=0)


class Net(M.Module):
    def __init__(self):
        super().__init__(name="net")
        self.layers = [M.Linear(2, 2), M.Linear(2, 2)]
        self.heads = {"a": M.Linear(2, 1)}
        self.scale = mge.tensor([2.0])
        self.weight = mge.Parameter(np.ones(2, "float32"))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.heads["a"](x) * self.scale


def test_attributes_with_modules_and_tensors_are_registered():
    net = Net()
    assert {name for name, _ in net.named_parameters()} == {
        "weight",
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "heads.a.weight",
        "heads.a.bias",
    }
    assert [name for name, _ in net.named_buffers()] == ["scale"]
    net.scale = mge.tensor([3.0])
    assert net.state_dict()["scale"].item() == 3.0
    assert net(torch.ones(1, 2)).shape == (1, 1)


def test_state_dicts_are_arrays_tensors_or_functions():
    net, other = Net(), Net()
    arrays = {name: value.numpy() for name, value in net.state_dict().items()}
    other.load_state_dict(arrays)
    assert torch.equal(other.layers[0].weight, net.layers[0].weight)
    other.load_state_dict(lambda _name, value: np.zeros(value.shape, "float32"))
    assert not any(parameter.detach().any() for parameter in other.parameters())
    other.load_state_dict({"scale": [5.0], "weight": None}, strict=False)
    assert other.scale.item() == 5.0
    with pytest.raises(ValueError, match="must load a dict or callable, got list"):
        other.load_state_dict([1])


@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
def test_fans_are_those_of_torch(mode):
    weight = torch.empty(8, 3, 5, 5)
    expected = nn.init._calculate_correct_fan(weight, mode)
    assert M.init.calculate_correct_fan(weight, mode) == expected
    with pytest.raises(ValueError, match="fan_both not supported"):
        M.init.calculate_correct_fan(weight, "fan_both")


def test_wrong_modes_are_refused():
    with pytest.raises(AssertionError, match="must be 'cross_correlation', got 'convolution'"):
        M.Conv2d(1, 1, 1, conv_mode="convolution")
    with pytest.raises(ValueError, match="average_count_exclude_padding, average, got 'sum'"):
        M.AvgPool2d(2, mode="sum")
