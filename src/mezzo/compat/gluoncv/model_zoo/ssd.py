"""SSD of gluoncv with ResNet-50 v1 at 512 pixels: features, predictors, anchors and decoding."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mezzo.compat.gluoncv.model_zoo._detections import decode_boxes, select_detections
from mezzo.compat.gluoncv.model_zoo._files import DEFAULT_ROOT, find_weights
from mezzo.compat.gluoncv.model_zoo.resnet import check_arguments, get_resnet, sequence
from mezzo.compat.mxnet import autograd, initializer
from mezzo.compat.mxnet._params import read_params
from mezzo.compat.mxnet.gluon.block import HybridBlock, Layer
from mezzo.compat.mxnet.gluon.nn import Activation, BatchNorm, Conv2D, HybridSequential

Tensor = torch.Tensor

_FILTERS = (512, 512, 256, 256)
_FEATURE_CHANNELS = (1024, 2048, *_FILTERS)
_RATIOS = [[1, 2, 0.5], *[[1, 2, 0.5, 3, 1 / 3]] * 3, *[[1, 2, 0.5]] * 2]
_STEPS = (16, 32, 64, 128, 256, 512)
_SIZES = {
    "coco": (51.2, 133.12, 215.04, 296.96, 378.88, 460.8, 542.72),
    "voc": (51.2, 102.4, 189.4, 276.4, 363.52, 450.6, 492.0),
}
_ANCHOR_MAP_SIZES = (128, 64, 32, 16, 16, 16)
"""Sizes of the stored anchor maps: the largest feature maps that the network accepts."""

_CLASSES = {
    "coco": (
        "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire"
        " hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant,"
        " bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis,"
        " snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis"
        " racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich,"
        " orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed,"
        " dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven,"
        " toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier,"
        " toothbrush"
    ).split(", "),
    "voc": (
        "aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog,"
        " horse, motorbike, person, pottedplant, sheep, sofa, train, tvmonitor"
    ).split(", "),
}


class SSD(Layer):
    """Class scores, boxes and anchors in training mode, else ids, scores and boxes of detections.

    Training mode is that of `autograd.record()`.
    """

    def __init__(
        self, base: HybridSequential, classes: Sequence[str], sizes: Sequence[float]
    ) -> None:
        super().__init__()
        self.classes = list(classes)
        self.set_nms()
        self.features = _Features(base)
        self.anchor_generators = sequence(
            *map(_AnchorGenerator, pairwise(sizes), _RATIOS, _STEPS, _ANCHOR_MAP_SIZES)
        )
        self.class_predictors, self.box_predictors = HybridSequential(), HybridSequential()
        for channels, ratios in zip(_FEATURE_CHANNELS, _RATIOS, strict=True):
            anchors = len(ratios) + 1
            self.class_predictors.add(_Predictor(channels, anchors * (self.num_classes + 1)))
            self.box_predictors.add(_Predictor(channels, anchors * 4))

    @property
    def num_classes(self) -> int:
        """The number of classes without the background."""
        return len(self.classes)

    def set_nms(self, nms_thresh: float = 0.45, nms_topk: int = 400, post_nms: int = 100) -> None:
        """Set the suppression of overlapping detections."""
        self.nms_thresh, self.nms_topk, self.post_nms = nms_thresh, nms_topk, post_nms

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the class describes, of shapes (N, anchors, ...) or (N, post_nms, ...)."""
        features = self.features(data)
        scores = _join(self.class_predictors, features).unflatten(1, (-1, self.num_classes + 1))
        boxes = _join(self.box_predictors, features).unflatten(1, (-1, 4))
        pairs = zip(self.anchor_generators, features, strict=True)
        anchors = torch.cat([generator(feature) for generator, feature in pairs]).unsqueeze(0)
        if self.training and autograd.is_training():
            return scores, boxes, anchors
        return select_detections(
            torch.softmax(scores, -1),
            decode_boxes(boxes, anchors),
            threshold=self.nms_thresh,
            top_k=self.nms_topk,
            keep=self.post_nms,
        )


class _Features(Layer):
    """Six feature maps: after stages 3 and 4 of the base, then of four pairs of convolutions."""

    def __init__(self, base: HybridSequential) -> None:
        super().__init__()
        # The last block of a ResNet is its pooling.
        self.base = base[:-1]
        self.expand = HybridSequential()
        for inputs, filters in zip(_FEATURE_CHANNELS[1:-1], _FILTERS, strict=True):
            self.expand.add(
                sequence(
                    *_convolution(inputs, filters, 1, 1, 0),
                    *_convolution(filters, filters, 3, 2, 1),
                )
            )

    def forward(self, data: Tensor) -> list[Tensor]:
        """Return the feature maps, the largest first."""
        features = [data]
        for block in [*self.base, *self.expand]:
            features.append(block(features[-1]))
        return features[-len(_FEATURE_CHANNELS) :]


def _convolution(
    inputs: int, filters: int, kernel: int, stride: int, padding: int
) -> list[HybridBlock]:
    init = initializer.Xavier("gaussian", "out", 2)
    return [
        Conv2D(
            filters,
            kernel,
            stride,
            padding,
            use_bias=False,
            in_channels=inputs,
            weight_initializer=init,
        ),
        # As in gluoncv, which adds these layers as symbols: gamma is fixed, epsilon is MXNet's.
        BatchNorm(epsilon=1e-3, scale=False, in_channels=filters),
        Activation("relu"),
    ]


class _Predictor(Layer):
    """A 3 x 3 convolution, under gluoncv's name `predictor`."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        init = initializer.Xavier(magnitude=2)
        self.predictor = Conv2D(channels, 3, 1, 1, in_channels=in_channels, weight_initializer=init)

    def forward(self, data: Tensor) -> Tensor:
        """Return predictions of shape (N, H * W * channels)."""
        predictions: Tensor = self.predictor(data)
        return predictions.permute(0, 2, 3, 1).flatten(1)


def _join(predictors: HybridSequential, features: list[Tensor]) -> Tensor:
    pairs = zip(predictors, features, strict=True)
    return torch.cat([predictor(feature) for predictor, feature in pairs], 1)


class _AnchorGenerator(Layer):
    """Anchors (center x, center y, width, height) of a feature map, cut out of a stored map."""

    def __init__(
        self, sizes: tuple[float, float], ratios: Sequence[float], step: int, map_size: int
    ) -> None:
        super().__init__()
        small, middle = sizes[0], math.sqrt(sizes[0] * sizes[1])
        roots = [math.sqrt(ratio) for ratio in ratios[1:]]
        shapes = [(small, small), (middle, middle), *((small * r, small / r) for r in roots)]
        centers = (torch.arange(map_size) + 0.5) * step
        y, x = torch.meshgrid(centers, centers, indexing="ij")
        grid = torch.stack([x, y], -1)[:, :, None].expand(-1, -1, len(shapes), -1)
        extents = torch.tensor(shapes).expand(map_size, map_size, -1, -1)
        self.anchors: Tensor
        self.register_buffer("anchors", torch.cat([grid, extents], -1).float())

    def forward(self, feature: Tensor) -> Tensor:
        """Return the anchors of a feature map, of shape (H * W * number, 4)."""
        height, width = feature.shape[-2:]
        return self.anchors[:height, :width].reshape(-1, 4)

    def reset_parameters(self) -> None:
        """Keep the anchors."""


def get_ssd_512_resnet50(
    dataset: str,
    pretrained: bool | str = False,
    pretrained_base: bool | str = True,
    root: str = DEFAULT_ROOT,
    ctx: Any = None,
    classes: Sequence[str] | None = None,
    norm_layer: Any = BatchNorm,
    norm_kwargs: dict[str, Any] | None = None,
    **unknown: Any,
) -> SSD:
    """Return SSD with a ResNet-50 v1 at 512 pixels, for COCO, VOC or classes of your own.

    `pretrained_base=True` is the default, as in gluoncv: it reads the weights of `resnet50_v1`.
    """
    name = f"ssd_512_resnet50_v1_{dataset}"
    check_arguments(name, unknown)
    known = _CLASSES.get(dataset) if classes is None else classes
    if known is None:
        raise ValueError(f"get_model({name!r}) needs classes=, the names of your classes.")
    weights = find_weights(name, pretrained, root) if pretrained else None
    base = get_resnet(
        50,
        pretrained=False if pretrained else pretrained_base,
        root=root,
        norm_layer=norm_layer,
        norm_kwargs=norm_kwargs,
    )
    network = SSD(base.features, known, _SIZES.get(dataset, _SIZES["voc"]))
    if weights is not None:
        network.collect_params().load_dict(_renamed(network, read_params(weights)), str(weights))
        network.mark_initialized()
    if ctx is not None:
        network.collect_params().reset_ctx(ctx)
    return network


# -- names of gluoncv's files ----------------------------------------------------------------------


def _renamed(network: SSD, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file of gluoncv's SSD under the names of this network.

    There the features are a symbol, whose parameters are numbered by kind and stage:
    `features.resnetv10_stage1_conv0_weight`, `features.expand_trans_bn0_gamma`.
    """
    names = _symbol_names(network.features)
    renamed = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"features\.(?:\w*resnetv1\d+_)?(\w+)", name)
        if ".anchors" in name:
            # Constants, which the network computes itself.
            continue
        renamed[f"features.{names.get(match[1], match[1])}" if match else name] = tensor
    for index, generator in enumerate(network.anchor_generators):
        renamed[f"anchor_generators.{index}.anchors"] = generator.get_buffer("anchors")
    return renamed


def _symbol_names(features: _Features) -> dict[str, str]:
    """Return the symbol's names of the layers' parameters → their paths in `features`."""
    names: dict[str, str] = {}
    counts: dict[tuple[str, str], int] = {}
    for path, module in features.base.named_modules():
        index = int(path.partition(".")[0] or 0)
        stage = f"stage{index - 3}_" if index > 3 else ""
        kind = "conv" if isinstance(module, nn.Conv2d) else "batchnorm"
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            number = counts.setdefault((stage, kind), 0)
            counts[stage, kind] += 1
            names |= _parameter_names(module, f"{stage}{kind}{number}", f"base.{path}")
    for index in range(len(_FILTERS)):
        for position, kind in ((0, "trans_conv"), (1, "trans_bn"), (3, "conv"), (4, "bn")):
            module = features.expand[index][position]
            names |= _parameter_names(module, f"expand_{kind}{index}", f"expand.{index}.{position}")
    return names


def _parameter_names(module: nn.Module, symbol: str, path: str) -> dict[str, str]:
    if isinstance(module, nn.Conv2d):
        kinds = {"weight": "weight", "bias": "bias"}
    else:
        kinds = {"gamma": "gamma", "beta": "beta"}
        for statistic in ("mean", "var"):
            # Symbols name statistics moving_, gluon's layers running_.
            kinds[f"moving_{statistic}"] = kinds[f"running_{statistic}"] = f"running_{statistic}"
    return {f"{symbol}_{kind}": f"{path}.{own}" for kind, own in kinds.items()}
