"""ResNet v1 of gluoncv: structure, names, files of weights and errors."""

import pytest
import torch

import mezzo
import mezzo.compat.mxnet as mx
from mezzo.compat import gluoncv
from mezzo.compat.gluoncv.model_zoo import get_model, get_model_list
from mezzo.compat.gluoncv.model_zoo._files import find_weights
from mezzo.compat.mxnet import gluon, nd


@pytest.fixture(autouse=True)
def no_mxnet_home(monkeypatch):
    monkeypatch.delenv("MXNET_HOME", raising=False)


@pytest.fixture(scope="module")
def network():
    return get_model("resnet18_v1", classes=4)


def test_a_network_has_the_names_of_gluoncv(network):
    names = list(network.collect_params())
    assert names[0] == "features.0.weight"
    assert "features.1.gamma" in names
    assert "features.4.0.body.0.weight" in names
    assert "features.5.0.downsample.1.running_mean" in names
    assert names[-1] == "output.bias"
    assert len(names) == 102


def test_images_give_logits(network):
    assert network(nd.ones((2, 3, 32, 32))).shape == (2, 4)


def test_a_deeper_network_has_the_layers_of_gluoncv():
    network = get_model("resnet50_v1")
    shapes = {name: value.shape for name, value in network.collect_params().items()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 25_629_032
    # The 1 x 1 convolutions of gluoncv's bottleneck have a bias, and the first has the stride.
    assert shapes["features.5.0.body.0.bias"] == (128,)
    assert network.features[5][0].body[0].stride == (2, 2)
    assert "features.5.0.body.3.bias" not in shapes


def test_the_normalization_can_be_replaced():
    kwargs = {"use_global_stats": True, "epsilon": 1e-3}
    network = get_model("resnet18_v1", norm_layer=gluon.nn.BatchNorm, norm_kwargs=kwargs)
    assert network.features[1].use_global_stats
    assert network.features[1].eps == 1e-3


def test_pretrained_weights_are_read_from_the_folder_of_gluoncv(network, tmp_path):
    network.save_parameters(tmp_path / "resnet18_v1-0a1b2c3d.params")
    loaded = get_model("resnet18_v1", classes=4, pretrained=True, root=str(tmp_path), ctx=mx.cpu())
    assert torch.equal(loaded.output.weight, network.output.weight)
    with pytest.warns(UserWarning, match="already initialized, ignoring"):
        loaded.initialize()
    assert torch.equal(loaded.output.weight, network.output.weight)


def test_weights_are_found_by_name_hash_and_mxnet_home(tmp_path, monkeypatch):
    models = tmp_path / "models"
    models.mkdir()
    first, second = models / "net-0a.params", models / "net-0b.params"
    first.touch()
    second.touch()
    assert find_weights("net", True, models) == second
    assert find_weights("net", "0a", models) == first
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    exact = models / "net.params"
    exact.touch()
    assert find_weights("net", True, "elsewhere") == exact


def test_missing_weights_are_named_with_their_place(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        get_model("resnet18_v1", pretrained=True, root=str(tmp_path))
    assert f"there is no file {tmp_path}/resnet18_v1-*.params" in str(error.value)
    assert "copy the file that gluoncv downloaded" in str(error.value)


def test_unknown_models_and_arguments_name_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'resnet50_v2' is not available. Choose one of: resnet18"
    ):
        get_model("resnet50_v2")
    with pytest.raises(
        mezzo.UnsupportedError, match=r"does not support use_se. It takes pretrained"
    ):
        get_model("resnet18_v1", use_se=True)
    assert "ssd_512_resnet50_v1_coco" in get_model_list()
    with pytest.raises(AttributeError, match=r"Use torchvision.datasets"):
        _ = gluoncv.data
