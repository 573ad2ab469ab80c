"""Test the networks of the built-in workloads: sizes, and their parts against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mezzo.comparing.detector import (
    AnchorLayout,
    Detector,
    detection_loss,
    join_predictions,
    match_anchors,
)
from mezzo.comparing.networks import LanguageModel, mlp, nine_linears
from mezzo.comparing.resnet import resnet18, resnet50


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: nine_linears(8192), 9 * (8192 * 8192 + 8192)),
        (mlp, 256 * 128 + 128 + 128 * 10 + 10),
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
        (lambda: resnet50(10, is_cifar=True), 23_520_842),
        (LanguageModel, 124_439_808),
    ],
)
def test_full_networks_have_the_published_number_of_parameters(make, count):
    with torch.device("meta"):
        assert parameters(make()) == count


def test_linear_layers_start_as_those_of_paddle():
    torch.manual_seed(0)
    model = nine_linears(64)
    bound = math.sqrt(6 / 128)
    assert len(model) == 9
    for layer in model:
        assert 0.9 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()


def test_a_resnet_for_cifar_keeps_the_size_of_the_image_until_its_second_stage():
    with torch.device("meta"):
        small, large = resnet50(10, is_cifar=True), resnet50(10)
        maps = [
            [tuple(one.shape[1:]) for one in network.features(torch.zeros(2, 3, 32, 32))]
            for network in (small, large)
        ]
    assert maps[0] == [(256, 32, 32), (512, 16, 16), (1024, 8, 8), (2048, 4, 4)]
    assert [shape[1:] for shape in maps[1]] == [(8, 8), (4, 4), (2, 2), (1, 1)]


def test_the_residual_blocks_of_a_resnet_for_cifar_do_nothing_at_first():
    block = resnet50(10, is_cifar=True, width=4).eval().stages[0][1]
    x = torch.rand(2, 16, 4, 4)
    assert torch.equal(block(x), x)
    assert not torch.equal(resnet50(10, width=4).eval().stages[0][1](x), x)


def test_the_language_model_shares_its_embedding_and_cannot_see_later_tokens():
    torch.manual_seed(0)
    model = LanguageModel(32, 2, 2, 64, 16)
    assert model.head.weight is model.tokens.weight
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = 0
    first, second = model(tokens), model(changed)
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.equal(first[:, 10:], second[:, 10:])


def test_the_detector_predicts_6132_anchors_of_81_classes_at_512_pixels():
    layout = AnchorLayout(512)
    with torch.device("meta"):
        model = Detector(resnet50(None), layout, classes=80)
        scores, offsets = model(torch.zeros(8, 3, 512, 512))
    assert layout.count == 6132
    assert (scores.shape, offsets.shape) == ((8, 6132, 81), (8, 6132, 4))
    assert layout.anchors().shape == (6132, 4)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("axis", [0, 1])
def test_anchors_are_in_the_order_of_the_predictions(axis):
    layout, maps = AnchorLayout(64, maps=3), []
    for cells, anchors in zip(layout.cells, layout.per_cell, strict=True):
        places = (torch.arange(cells) + 0.5) / cells
        rows, columns = torch.meshgrid(places, places, indexing="ij")
        maps.append((columns, rows)[axis].expand(1, anchors, cells, cells))
    copying = nn.ModuleList(nn.Identity() for _ in maps)
    predicted = join_predictions(copying, maps, 1)
    assert torch.equal(predicted.flatten(), layout.anchors()[:, axis])


def overlap(one: list[float], other: list[float]) -> float:
    """Return intersection over union of two boxes (center x, center y, width, height)."""
    sides = []
    for axis in (0, 1):
        low = max(one[axis] - one[axis + 2] / 2, other[axis] - other[axis + 2] / 2)
        high = min(one[axis] + one[axis + 2] / 2, other[axis] + other[axis + 2] / 2)
        sides.append(max(0.0, high - low))
    shared = sides[0] * sides[1]
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)


def reference_match(anchors, boxes, labels):
    classes, offsets = [], []
    for place, anchor in enumerate(anchors):
        overlaps = [overlap(anchor, box) for box in boxes]
        owner = max(range(len(boxes)), key=lambda box: overlaps[box])
        is_positive = overlaps[owner] >= 0.5
        for number, box in enumerate(boxes):
            if place == max(range(len(anchors)), key=lambda one: overlap(anchors[one], box)):
                owner, is_positive = number, True
        box = boxes[owner]
        classes.append(labels[owner] + 1 if is_positive else 0)
        encoded = [(box[axis] - anchor[axis]) / anchor[axis + 2] / 0.1 for axis in (0, 1)]
        encoded += [math.log(box[axis] / anchor[axis]) / 0.2 for axis in (2, 3)]
        offsets.append(encoded if is_positive else [0.0] * 4)
    return classes, offsets


def test_anchors_are_matched_as_by_a_slow_reference():
    anchors = AnchorLayout(64, maps=3).anchors().double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        sides = 0.1 + 0.5 * torch.rand(3, 2, generator=generator, dtype=torch.float64)
        centers = 0.2 + 0.6 * torch.rand(3, 2, generator=generator, dtype=torch.float64)
        boxes, labels = torch.cat([centers, sides], 1), torch.tensor([4, 0, 2])
        classes, offsets = match_anchors(anchors, boxes, labels)
        expected = reference_match(anchors.tolist(), boxes.tolist(), labels.tolist())
        assert classes.tolist() == expected[0]
        assert torch.allclose(offsets, torch.tensor(expected[1], dtype=torch.float64))
        assert len(set(classes.tolist())) >= 3


def reference_loss(scores, offsets, classes, targets):
    total, positives = 0.0, 0
    for image in range(len(scores)):
        entropies = []
        for row, label in zip(scores[image], classes[image], strict=True):
            entropies.append(math.log(sum(math.exp(score) for score in row)) - row[label])
        chosen = [place for place, label in enumerate(classes[image]) if label > 0]
        negatives = [place for place, label in enumerate(classes[image]) if label == 0]
        negatives.sort(key=lambda place: -entropies[place])
        total += sum(entropies[place] for place in chosen)
        total += sum(entropies[place] for place in negatives[: 3 * len(chosen)])
        for place in chosen:
            for value, target in zip(offsets[image][place], targets[image][place], strict=True):
                error = abs(value - target)
                total += error - 0.5 if error > 1 else 0.5 * error**2
        positives += len(chosen)
    return total / max(1, positives)


@pytest.mark.parametrize("positives", [0.0, 0.1, 0.5])
def test_the_loss_is_that_of_a_slow_reference(positives):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 40, 5, generator=generator, dtype=torch.float64)
    offsets, targets = 2 * torch.randn(2, 3, 40, 4, generator=generator, dtype=torch.float64)
    is_positive = torch.rand(3, 40, generator=generator) < positives
    # The second image has background only.
    is_positive[1] = False
    classes = torch.randint(1, 5, (3, 40), generator=generator) * is_positive
    loss = detection_loss(scores, offsets, classes, targets)
    values = [one.tolist() for one in (scores, offsets, classes, targets)]
    assert loss.item() == pytest.approx(reference_loss(*values), rel=1e-12, abs=1e-12)


def test_only_positive_anchors_and_hard_negatives_have_gradients():
    scores = torch.tensor(
        [[[0.0, 1.0], [2.0, 0.0], [0.0, 2.0], [0.0, 1.0], [0.0, 3.0], [9.0, 0.0]]]
    )
    scores.requires_grad_()
    offsets = torch.ones(1, 6, 4, requires_grad=True)
    classes = torch.tensor([[1, 0, 0, 0, 0, 0]])
    detection_loss(scores, offsets, classes, torch.zeros(1, 6, 4)).backward()
    # Of five negatives the three with the largest loss count: 2, 3 and 4.
    assert scores.grad.abs().sum(-1).bool().tolist() == [[True, False, True, True, True, False]]
    assert offsets.grad.abs().sum(-1).bool().tolist() == [[True] + [False] * 5]
