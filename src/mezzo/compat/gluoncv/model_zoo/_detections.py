"""Decode the predictions of SSD, and suppress overlapping detections of a class."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_STDS = (0.1, 0.1, 0.2, 0.2)
_MIN_SCORE = 0.01


def decode_boxes(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Return boxes (x min, y min, x max, y max) of offsets from anchors.

    >>> decode_boxes(torch.zeros(1, 1, 4), torch.tensor([[[8.0, 8.0, 4.0, 2.0]]]))
    tensor([[[ 6.,  7., 10.,  9.]]])
    """
    scaled = offsets.to(anchors.dtype) * torch.tensor(_STDS, device=offsets.device)
    centers = scaled[..., :2] * anchors[..., 2:] + anchors[..., :2]
    halves = torch.exp(scaled[..., 2:]) * anchors[..., 2:] / 2
    return torch.cat([centers - halves, centers + halves], -1)


def select_detections(
    probabilities: Tensor, boxes: Tensor, *, threshold: float, top_k: int, keep: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return class ids, scores and boxes of the best detections of each image, the best first.

    `probabilities` has the background as class 0. Of overlapping boxes of a class only the best
    remains. Empty places have the value -1, as in gluoncv.
    """
    foreground = probabilities[..., 1:]
    scores = foreground.flatten(1)
    is_valid = scores > _MIN_SCORE
    count = scores.shape[1] if top_k <= 0 else min(top_k, scores.shape[1])
    best = torch.where(is_valid, scores, -1.0).topk(count, dim=1)
    classes = best.indices % foreground.shape[-1]
    anchors = best.indices // foreground.shape[-1]
    chosen = boxes.gather(1, anchors.unsqueeze(-1).expand(-1, -1, 4))
    is_kept = best.values > 0
    if 0 < threshold < 1:
        is_kept = _suppress(chosen, classes, is_kept, threshold)
    found = torch.cat([classes.unsqueeze(-1), best.values.unsqueeze(-1), chosen], -1)
    found = torch.where(is_kept.unsqueeze(-1), found, -1.0)
    order = torch.argsort(is_kept.int(), dim=1, descending=True, stable=True)
    found = found.gather(1, order.unsqueeze(-1).expand_as(found))
    found = found[:, :keep] if keep > 0 else found
    return found[..., :1], found[..., 1:2], found[..., 2:]


def _suppress(boxes: Tensor, classes: Tensor, is_kept: Tensor, threshold: float) -> Tensor:
    """Return which boxes, sorted by score, overlap no better box of their class that is kept."""
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    overlap = (high - low).clamp(min=0).prod(-1)
    area = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
    union = (area[:, :, None] + area[:, None, :] - overlap).clamp(min=1e-12)
    same = classes[:, :, None] == classes[:, None, :]
    suppresses = ((overlap / union > threshold) & same).triu(1)
    for index in range(boxes.shape[1]):
        is_kept = is_kept & ~(suppresses[:, index] & is_kept[:, index, None])
    return is_kept
