"""An SSD detector on a ResNet: anchors, targets of anchors, and the loss with hard negatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.comparing.resnet import ResNet, initialize_convolutions

_THREE, _FIVE = (1.0, 2.0, 0.5), (1.0, 2.0, 0.5, 3.0, 1 / 3)
_RATIOS = (_THREE, _FIVE, _FIVE, _FIVE, _THREE, _THREE)
_SCALES = (0.1, 0.26, 0.42, 0.58, 0.74, 0.9, 1.06)
_EXTRA_CHANNELS = (512, 512, 256, 256)
_STRIDE = 16
"""Pixels between anchors of the first feature map, after the third stage of the ResNet."""
_CENTER_UNIT, _SIZE_UNIT = 0.1, 0.2
"""Units of offsets: their spread is about 1 in these."""
_POSITIVE_OVERLAP = 0.5
_NEGATIVES = 3
"""Hard negatives for each positive anchor."""


@dataclass(frozen=True)
class AnchorLayout:
    """Anchors of a square image: of each feature map a few for every cell.

    >>> AnchorLayout(512).count
    6132
    """

    pixels: int
    """Height and width of the image."""
    maps: int = 6
    """Feature maps; each has half the cells per side of the one before."""

    @property
    def cells(self) -> list[int]:
        """Cells per side of each feature map."""
        return [math.ceil(self.pixels / (_STRIDE * 2**place)) for place in range(self.maps)]

    @property
    def per_cell(self) -> list[int]:
        """Anchors of a cell of each feature map: one for each ratio, and a larger square."""
        return [len(ratios) + 1 for ratios in _RATIOS[: self.maps]]

    @property
    def count(self) -> int:
        """Anchors of an image."""
        pairs = zip(self.cells, self.per_cell, strict=True)
        return sum(cells**2 * anchors for cells, anchors in pairs)

    def anchors(self) -> Tensor:
        """Return center x, center y, width and height of every anchor, in parts of the image."""
        return torch.cat([self._map_anchors(place) for place in range(self.maps)])

    def _map_anchors(self, place: int) -> Tensor:
        small, large = _SCALES[place], math.sqrt(_SCALES[place] * _SCALES[place + 1])
        roots = [math.sqrt(ratio) for ratio in _RATIOS[place][1:]]
        shapes = torch.tensor(
            [(small, small), (large, large), *((small * root, small / root) for root in roots)]
        )
        cells = self.cells[place]
        centers = (torch.arange(cells) + 0.5) / cells
        y, x = torch.meshgrid(centers, centers, indexing="ij")
        grid = torch.stack([x, y], -1)[:, :, None].expand(-1, -1, len(shapes), -1)
        return torch.cat([grid, shapes.expand(cells, cells, -1, -1)], -1).reshape(-1, 4)


class Detector(nn.Module):
    """SSD: feature maps of a ResNet without a head and of more convolutions, with predictors.

    Images → scores [batch, anchors, 1 + classes], with the background as class 0, and offsets
    [batch, anchors, 4]. `width` scales the channels of the added convolutions; 64 is that of SSD.
    """

    def __init__(
        self, backbone: ResNet, layout: AnchorLayout, classes: int, *, width: int = 64
    ) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, classes
        channels = [*backbone.channels[-2:]]
        self.extra = nn.ModuleList()
        for outputs in _EXTRA_CHANNELS[: layout.maps - 2]:
            scaled = outputs * width // 64
            self.extra.append(_smaller_map(channels[-1], scaled))
            channels.append(scaled)
        heads = list(zip(channels, layout.per_cell, strict=True))
        self.scores = nn.ModuleList(
            nn.Conv2d(inputs, anchors * (1 + classes), 3, padding=1) for inputs, anchors in heads
        )
        self.offsets = nn.ModuleList(
            nn.Conv2d(inputs, anchors * 4, 3, padding=1) for inputs, anchors in heads
        )
        for predictor in (*self.scores, *self.offsets):
            nn.init.xavier_uniform_(predictor.weight)
            nn.init.zeros_(predictor.bias)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and offsets of all anchors."""
        maps = self.backbone.features(images)[-2:]
        for block in self.extra:
            maps.append(block(maps[-1]))
        return join_predictions(self.scores, maps, 1 + self.classes), join_predictions(
            self.offsets, maps, 4
        )


def match_anchors(anchors: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the targets of an image's anchors: classes (0: background), and offsets to boxes.

    An anchor belongs to the box that it overlaps most, from an overlap (intersection over union)
    of one half on; the anchor with the largest overlap of a box belongs to it in any case. Boxes
    are center x, center y, width and height; labels count from 0.

    >>> anchors = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.1, 0.1, 0.2, 0.2]])
    >>> match_anchors(anchors, anchors[:1], torch.tensor([6]))[0]
    tensor([7, 0])
    """
    overlaps = _overlaps(anchors, boxes)
    best, owner = overlaps.max(1)
    closest = overlaps.argmax(0)
    owner[closest] = torch.arange(len(boxes))
    is_positive = best >= _POSITIVE_OVERLAP
    is_positive[closest] = True
    matched = boxes[owner]
    centers = (matched[:, :2] - anchors[:, :2]) / anchors[:, 2:] / _CENTER_UNIT
    sizes = torch.log(matched[:, 2:] / anchors[:, 2:]) / _SIZE_UNIT
    classes = torch.where(is_positive, labels[owner] + 1, 0)
    return classes, torch.cat([centers, sizes], 1) * is_positive[:, None]


def detection_loss(scores: Tensor, offsets: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """Return cross entropy and smooth L1 loss, divided by the number of positive anchors.

    Cross entropy is that of positive anchors and, in each image, of three times as many negative
    ones with the largest loss; other anchors are ignored. Smooth L1 is that of positive anchors.
    Does not synchronize.

    >>> scores, offsets = torch.zeros(1, 8, 3), torch.zeros(1, 8, 4)
    >>> classes = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0]])
    >>> detection_loss(scores, offsets, classes, offsets) / math.log(3)  # one positive, three not
    tensor(4.)
    """
    is_positive = classes > 0
    entropy = F.cross_entropy(scores.flatten(0, 1), classes.flatten(), reduction="none")
    entropy = entropy.view_as(classes)
    hardness = entropy.detach().masked_fill(is_positive, -1.0)
    rank = hardness.argsort(stable=True, dim=1, descending=True).argsort(dim=1)
    is_used = is_positive | (rank < _NEGATIVES * is_positive.sum(1, keepdim=True))
    class_loss = entropy.masked_fill(~is_used, 0.0).sum()
    box_loss = F.smooth_l1_loss(offsets, targets, reduction="none")
    box_loss = box_loss.masked_fill(~is_positive[..., None], 0.0).sum()
    return (class_loss + box_loss) / is_positive.sum().clamp(min=1)


def _overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return intersection over union of every pair of boxes."""
    low = torch.maximum(_corner(first, -0.5)[:, None], _corner(second, -0.5))
    high = torch.minimum(_corner(first, 0.5)[:, None], _corner(second, 0.5))
    shared = (high - low).clamp(min=0).prod(-1)
    areas = first[:, None, 2:].prod(-1) + second[:, 2:].prod(-1)
    return shared / (areas - shared)


def _corner(boxes: Tensor, side: float) -> Tensor:
    return boxes[:, :2] + side * boxes[:, 2:]


def _smaller_map(inputs: int, outputs: int) -> nn.Sequential:
    block = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, 2, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
    block.apply(initialize_convolutions)
    return block


def join_predictions(predictors: nn.ModuleList, maps: Sequence[Tensor], values: int) -> Tensor:
    """Return the predictions of all feature maps, [batch, anchors, values]."""
    pairs = zip(predictors, maps, strict=True)
    rows = [predictor(features).permute(0, 2, 3, 1).flatten(1) for predictor, features in pairs]
    joined: Tensor = torch.cat(rows, 1).unflatten(1, (-1, values))
    return joined
