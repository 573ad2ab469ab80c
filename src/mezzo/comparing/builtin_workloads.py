"""The built-in workloads of `mezzo compare`, each the experiment of one document."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from mezzo._errors import PolicyError, unknown
from mezzo.comparing.datasets import (
    LabeledImages,
    load_digits,
    normalized,
    painted_boxes,
    painted_images,
    random_tokens,
    read_cifar10,
    read_text,
    text_batch,
)
from mezzo.comparing.detector import AnchorLayout, Detector, detection_loss
from mezzo.comparing.networks import LanguageModel, mlp, nine_linears
from mezzo.comparing.resnet import ResNet, resnet18, resnet50
from mezzo.comparing.workload import Batch, Documented, Preset, Workload

WORKLOADS = {
    "linears": "nine linear layers of 8192 × 8192, batch 2048 (PaddlePaddle)",
    "mlp": "MLP 256-128-10, batch 128 (OneFlow)",
    "resnet18": "ResNet-18 at 224 × 224 pixels (MegEngine)",
    "cifar": "ResNet-50 on CIFAR-10, with accuracy (comparison of torch.amp and Apex)",
    "ssd": "SSD-512 detector on ResNet-50, 6132 anchors, batch 8 (MXNet)",
    "gpt": "GPT-2 with 124 million parameters, 8 × 1024 tokens",
}
"""Name on the command line → one line for its help."""

_TAKES_DATA = {"cifar": "cifar-10-batches-py, the folder of CIFAR-10", "gpt": "a folder of .txt"}
_DISTINCT = 10
"""Batches of a workload that repeat: those of an epoch of PaddlePaddle's experiment."""
_PADDLE = "PaddlePaddle, V100"


def load_workload(name: str, preset: Preset, data: Path | None = None) -> Workload:
    """Return a built-in workload at a size, with the data of a folder if one is given.

    In all of them the model has one input, the first value of a batch.

    >>> load_workload("mlp", Preset.SMALL).title
    'MLP 256-128-10, batch 128, SGD'
    """
    if name not in _MAKERS:
        raise PolicyError(unknown("workload", name, WORKLOADS))
    if data is None:
        return _MAKERS[name](preset)
    if name not in _TAKES_DATA:
        others = " and ".join(f"{name} ({what})" for name, what in _TAKES_DATA.items())
        raise PolicyError(
            f"--data {data}: the workload {name} has synthetic data only. Leave --data out; it is"
            f" for {others}."
        )
    if not data.is_dir():
        raise PolicyError(f"--data {data}: there is no such folder. Pass {_TAKES_DATA[name]}.")
    return _cifar(preset, data) if name == "cifar" else _gpt(preset, data)


def _linears(preset: Preset) -> Workload:
    width, batch, rate = (8192, 2048, 1e-4) if preset is Preset.FULL else (128, 32, 1e-2)

    def make_batch(number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        return tuple(torch.rand(batch, width, generator=generator) for _ in range(2))

    return Workload(
        "linears",
        f"9 × Linear({width}), batch {batch}, SGD",
        preset,
        "synthetic",
        make_model=partial(nine_linears, width),
        make_optimizer=_sgd(rate),
        make_batch=_repeated(make_batch),
        loss=_mean_squared_error,
        samples=batch,
        steps=20,
        documented=(
            Documented("O1", 4.5, _PADDLE),
            Documented("O2", 5.2, _PADDLE),
            Documented("O2 captured", 5.4, f"{_PADDLE}, static program"),
            Documented("O2", 8.0, "NVIDIA, V100, products and convolutions alone, at most"),
        ),
    )


def _mlp(preset: Preset) -> Workload:
    def make_batch(number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(128, 256, generator=generator), torch.ones(128, dtype=torch.int64)

    return Workload(
        "mlp",
        "MLP 256-128-10, batch 128, SGD",
        preset,
        "synthetic",
        make_model=mlp,
        make_optimizer=_sgd(1e-3),
        make_batch=make_batch,
        loss=_cross_entropy,
        samples=128,
        steps=100,
    )


def _resnet18(preset: Preset) -> Workload:
    pixels, batch, classes, width = (
        (224, 64, 1000, 64) if preset is Preset.FULL else (32, 32, 10, 4)
    )
    return Workload(
        "resnet18",
        f"ResNet-18{_width(width)}, {pixels} × {pixels}, batch {batch}, SGD",
        preset,
        "synthetic",
        make_model=partial(resnet18, classes, width=width),
        make_optimizer=_sgd(0.01),
        make_batch=_repeated(partial(painted_images, size=batch, pixels=pixels, classes=classes)),
        loss=_cross_entropy,
        samples=batch,
        steps=50 if preset is Preset.FULL else 20,
        channels_last=True,
        documented=(
            Documented("O1", 2.0, "MegEngine, Volta and later, at least"),
            Documented("O1", 3.0, "MegEngine, Volta and later, at most"),
        ),
    )


def _cifar(preset: Preset, data: Path | None = None) -> Workload:
    images = load_digits() if data is None else read_cifar10(data)
    is_full = preset is Preset.FULL
    batch, epochs, width = (128, 10 if data else 20, 64) if is_full else (32, 5, 4)
    if not is_full:
        images = _first(images, 12 * batch)
    if len(images.train) < batch:
        raise PolicyError(
            f"--data {data}: {len(images.train)} images to train on are fewer than a batch of"
            f" {batch}. Extract cifar-10-python.tar.gz again."
        )
    steps = images.epoch_steps(batch)
    return Workload(
        "cifar",
        f"ResNet-50{_width(width)}, batch {batch}, SGD",
        preset,
        images.description,
        make_model=partial(resnet50, 10, is_cifar=True)
        if is_full
        else partial(_small_resnet50, 10, stages=3),
        # Momentum makes so short and small a run depend on rounding, hence none in the small one.
        make_optimizer=_sgd(0.05, momentum=0.9, weight_decay=5e-4) if is_full else _sgd(0.3),
        make_batch=partial(images.train_batch, size=batch),
        loss=_cross_entropy,
        samples=batch,
        steps=epochs * steps,
        epoch_steps=steps,
        evaluate=partial(_accuracy, images, batch),
        channels_last=True,
    )


def _ssd(preset: Preset) -> Workload:
    is_full = preset is Preset.FULL
    layout = AnchorLayout(512) if is_full else AnchorLayout(64, maps=3)
    batch, classes, width = (8, 80, 64) if is_full else (4, 4, 4)

    def make_model() -> nn.Module:
        backbone = resnet50(None) if is_full else _small_resnet50(None, stages=4)
        return Detector(backbone, layout, classes, width=width)

    return Workload(
        "ssd",
        f"SSD-{layout.pixels} on ResNet-50{_width(width)}, {layout.count} anchors, batch {batch},"
        " SGD",
        preset,
        "synthetic",
        make_model=make_model,
        make_optimizer=_sgd(0.001, momentum=0.9, weight_decay=0.0005),
        make_batch=_repeated(partial(painted_boxes, size=batch, layout=layout, classes=classes)),
        loss=_detection_loss,
        samples=batch,
        steps=200 if is_full else 40,
        # The document logs every 50 batches.
        epoch_steps=50 if is_full else 10,
        channels_last=True,
        documented=(Documented("O1", 1.6, "MXNet, AMP tutorial"),),
    )


def _gpt(preset: Preset, data: Path | None = None) -> Workload:
    is_full = preset is Preset.FULL
    layers, width, vocabulary = (12, 768, 50257) if is_full else (2, 64, 256)
    batch, length = (8, 1024) if is_full else (2, 64)
    if data is None:
        description = "synthetic"
        make_batch = partial(random_tokens, size=batch, length=length, vocabulary=vocabulary)
    else:
        text, description = read_text(data, length)
        make_batch = partial(text_batch, text, size=batch, length=length)
    return Workload(
        "gpt",
        f"GPT-2, {layers} layers of {width}, batch {batch} × {length}, AdamW",
        preset,
        description,
        make_model=partial(
            LanguageModel, width, layers, width // 64 if is_full else 2, vocabulary, length
        ),
        make_optimizer=partial(_adamw, rate=3e-4 if is_full else 3e-3),
        make_batch=make_batch,
        loss=_token_cross_entropy,
        samples=batch,
        steps=50 if is_full else 20,
    )


_MAKERS: dict[str, Callable[[Preset], Workload]] = {
    "linears": _linears,
    "mlp": _mlp,
    "resnet18": _resnet18,
    "cifar": _cifar,
    "ssd": _ssd,
    "gpt": _gpt,
}


# -- what workloads share --------------------------------------------------------------------------


def _small_resnet50(classes: int | None, stages: int) -> ResNet:
    """Return a ResNet-50 with a sixteenth of its channels, and one block in each stage."""
    return ResNet((1,) * stages, classes, is_bottleneck=True, width=4)


def _width(width: int) -> str:
    return "" if width == 64 else f" of width {width}"


def _sgd(
    rate: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD(
        model.parameters(), lr=rate, momentum=momentum, weight_decay=weight_decay
    )


def _adamw(model: nn.Module, rate: float) -> Optimizer:
    return AdamW(model.parameters(), lr=rate)


def _repeated(make_batch: Callable[[int], Batch]) -> Callable[[int], Batch]:
    """Return `make_batch` with a few distinct batches, for large ones take long to draw."""
    kept = lru_cache(maxsize=_DISTINCT)(make_batch)
    return lambda number: kept(number % _DISTINCT)


def _mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _token_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def _detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, classes, targets = batch
    scores, offsets = model(images)
    return detection_loss(scores, offsets, classes, targets)


def _first(images: LabeledImages, count: int) -> LabeledImages:
    """Return some of the images, to train and to test on."""
    return LabeledImages(
        images.train[:count],
        images.train_labels[:count],
        images.test[:count],
        images.test_labels[:count],
        images.description,
    )


@torch.no_grad()
def _accuracy(images: LabeledImages, batch: int, model: nn.Module) -> float:
    """Return the part of the test images that a model classifies correctly."""
    device = next(model.parameters()).device
    correct = 0
    for chosen, labels in zip(
        images.test.split(batch), images.test_labels.split(batch), strict=True
    ):
        # Every call has the batch size of training: a converted model may take no other.
        padded = chosen[torch.arange(batch) % len(chosen)]
        logits = model(normalized(padded).to(device))[: len(chosen)]
        correct += int((logits.argmax(1).cpu() == labels).sum())
    return correct / len(images.test)
