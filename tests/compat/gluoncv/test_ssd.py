"""SSD of gluoncv: anchors, training outputs, detections, and files of weights."""

import pytest
import torch

import mezzo.compat.mxnet as mx
from mezzo.compat.gluoncv.loss import SSDMultiBoxLoss
from mezzo.compat.gluoncv.model_zoo import get_model
from mezzo.compat.gluoncv.model_zoo import ssd as ssd_module
from mezzo.compat.gluoncv.model_zoo._detections import decode_boxes, select_detections
from mezzo.compat.mxnet import autograd, gluon, nd
from mezzo.compat.mxnet.contrib import amp

NAME = "ssd_512_resnet50_v1_custom"


@pytest.fixture(scope="module")
def network():
    mx.random.seed(0)
    return get_model(NAME, classes=["a", "b"], pretrained_base=False)


def test_training_gives_scores_boxes_and_anchors(network):
    with autograd.record():
        scores, boxes, anchors = network(nd.ones((2, 3, 64, 64)))
    assert (scores.shape, boxes.shape, anchors.shape) == ((2, 108, 3), (2, 108, 4), (1, 108, 4))
    assert not anchors.requires_grad


def test_512_pixels_have_6132_anchors(network):
    sizes = [32, 16, 8, 4, 2, 1]
    pairs = zip(network.anchor_generators, sizes, strict=True)
    counts = [len(make(torch.ones(1, 1, size, size))) for make, size in pairs]
    assert counts == [4096, 1536, 384, 96, 16, 4]
    assert sum(counts) == 6132


def test_datasets_have_their_classes():
    assert (len(ssd_module._CLASSES["coco"]), len(ssd_module._CLASSES["voc"])) == (80, 20)


def test_anchors_are_centered_in_their_cells(network):
    anchors = network.anchor_generators[0](torch.ones(1, 1, 2, 2))
    assert anchors.shape == (16, 4)
    assert anchors[0].tolist() == pytest.approx([8, 8, 51.2, 51.2])
    # The geometric mean of this layer's size and the next one's.
    assert anchors[1].tolist() == pytest.approx([8, 8, 72.4077, 72.4077])
    assert anchors[2].tolist() == pytest.approx([8, 8, 72.4077, 36.2039], rel=1e-4)
    assert anchors[4].tolist() == pytest.approx([24, 8, 51.2, 51.2])


def test_inference_gives_detections(network):
    ids, scores, boxes = network(nd.random.uniform(shape=(1, 3, 64, 64)))
    assert (ids.shape, scores.shape, boxes.shape) == ((1, 100, 1), (1, 100, 1), (1, 100, 4))
    values = scores.asnumpy().flatten().tolist()
    assert values == sorted(values, reverse=True)
    network.set_nms(post_nms=5)
    assert network(nd.ones((1, 3, 64, 64)))[0].shape == (1, 5, 1)
    network.set_nms()


def test_overlapping_boxes_of_a_class_are_suppressed():
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]]])
    probabilities = torch.tensor([[[0.1, 0.9, 0.0], [0.2, 0.3, 0.5], [0.99, 0.005, 0.005]]])
    ids, scores, kept = select_detections(probabilities, boxes, threshold=0.45, top_k=400, keep=4)
    # The second box has class 0 too, which the first suppresses; the third is background.
    assert ids.flatten().tolist() == [0.0, 1.0, -1.0, -1.0]
    assert scores.flatten().tolist() == pytest.approx([0.9, 0.5, -1.0, -1.0])
    assert kept[0, 1].tolist() == [0, 0, 10, 9]
    everything = select_detections(probabilities, boxes, threshold=0.0, top_k=0, keep=0)
    assert everything[0].flatten().tolist() == [0.0, 1.0, 0.0, -1.0, -1.0, -1.0]


def test_offsets_are_decoded_by_the_deviations_of_gluoncv():
    decoded = decode_boxes(torch.ones(1, 1, 4), torch.tensor([[[10.0, 10.0, 4.0, 4.0]]]))
    half = 2 * torch.tensor(0.2).exp().item()
    assert decoded.flatten().tolist() == pytest.approx(
        [10.4 - half, 10.4 - half, 10.4 + half, 10.4 + half]
    )


def test_the_base_is_pretrained_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv("MXNET_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match=r"resnet50_v1-\*.params.*pretrained_base=False"):
        get_model("ssd_512_resnet50_v1_coco", root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"ssd_512_resnet50_v1_voc-\*.params"):
        get_model("ssd_512_resnet50_v1_voc", pretrained=True, root=str(tmp_path))
    with pytest.raises(ValueError, match="needs classes="):
        get_model(NAME, pretrained_base=False)


def test_files_of_gluoncv_name_features_by_kind_and_stage(network, tmp_path, monkeypatch):
    monkeypatch.delenv("MXNET_HOME", raising=False)
    symbol_names = ssd_module._symbol_names(network.features)
    assert symbol_names["conv0_weight"] == "base.0.weight"
    assert symbol_names["stage1_conv3_weight"] == "base.4.0.downsample.0.weight"
    assert symbol_names["stage3_batchnorm0_running_var"] == "base.6.0.body.1.running_var"
    assert symbol_names["expand_trans_bn2_moving_mean"] == "expand.2.1.running_mean"
    own = {f"features.{path}": name for name, path in symbol_names.items()}
    saved = {
        (
            f"features.{'' if 'expand' in own[name] else 'ssd0_resnetv10_'}{own[name]}"
            if name in own
            else name
        ): value.tensor.detach() + 1
        for name, value in network.collect_params().items()
    }
    (tmp_path / f"{NAME}-12345678.params").touch()
    monkeypatch.setattr(ssd_module, "read_params", lambda _: saved)
    loaded = get_model(NAME, classes=["a", "b"], pretrained=True, root=str(tmp_path))
    expected = network.collect_params()
    for name, parameter in loaded.collect_params().items():
        offset = 0 if name.endswith("anchors") else 1
        assert torch.equal(parameter.tensor, expected[name].tensor + offset), name


def test_float32_and_amp_give_close_losses(network):
    data = nd.random.uniform(-1, 1, shape=(2, 3, 64, 64))
    targets = nd.random.uniform(0, 1, shape=(2, 108)), nd.random.uniform(0, 1, shape=(2, 108, 4))

    def compute():
        with autograd.record(), torch.no_grad():
            scores, boxes, _ = network(data)
            return scores.dtype, SSDMultiBoxLoss()([scores], [boxes], *([one] for one in targets))

    dtype, expected = compute()
    with amp.init("bfloat16"):
        low, losses = compute()
    assert (dtype.__name__, low) == ("float32", torch.bfloat16)
    for one, other in zip(expected, losses, strict=True):
        assert one[0].sum().asscalar() == pytest.approx(other[0].sum().asscalar(), rel=0.02)


def test_networks_take_the_normalization_of_the_program(network):
    assert isinstance(network.features.base[1], gluon.nn.BatchNorm)
    assert not network.features.expand[0][1].weight.requires_grad
    assert network.features.expand[0][1].eps == 1e-3
