"""Data of the workloads: CIFAR-10, scikit-learn's digits, text files, and synthetic images."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.comparing.detector import AnchorLayout, match_anchors
from mezzo.comparing.workload import Batch

_CIFAR_FOLDER = "cifar-10-batches-py"
_TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST_FILE = "test_batch"
_CIFAR_SHAPE = (3, 32, 32)
_DIGITS_PART = 5
"""One of so many digits is tested on and not trained on."""


@dataclass(frozen=True)
class LabeledImages:
    """Images to train on and to test on, as bytes, and what they are."""

    train: Tensor
    """[count, 3, height, width], uint8."""
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    description: str

    def train_batch(self, number: int, size: int) -> Batch:
        """Return the batch of a step: each epoch has its own order, the same in every run."""
        epoch, place = divmod(number, self.epoch_steps(size))
        order = torch.randperm(len(self.train), generator=_generator(epoch))
        chosen = order[place * size : (place + 1) * size]
        return normalized(self.train[chosen]), self.train_labels[chosen]

    def epoch_steps(self, size: int) -> int:
        """Return how many whole batches an epoch has."""
        return len(self.train) // size


def normalized(images: Tensor) -> Tensor:
    """Return bytes of images as float32 with about mean 0 and variance 1."""
    return images.float().div_(255.0).sub_(0.47).div_(0.25)


# -- files -----------------------------------------------------------------------------------------


def read_cifar10(folder: Path) -> LabeledImages:
    """Read CIFAR-10 from the files of its Python version.

    `folder` is `cifar-10-batches-py`, or the folder that it is in.
    """
    inner = folder / _CIFAR_FOLDER
    place = inner if inner.is_dir() else folder
    missing = [name for name in (*_TRAIN_FILES, _TEST_FILE) if not (place / name).is_file()]
    if missing:
        raise PolicyError(
            f"--data {folder}: the folder has no CIFAR-10, for {', '.join(missing)} are missing in"
            f" {place}. Pass the folder {_CIFAR_FOLDER} of the archive cifar-10-python.tar.gz."
        )
    parts = [_read_cifar_file(place / name) for name in _TRAIN_FILES]
    images, labels = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
    return LabeledImages(images, labels, *_read_cifar_file(place / _TEST_FILE), "CIFAR-10")


def _read_cifar_file(path: Path) -> tuple[Tensor, Tensor]:
    try:
        content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        images = torch.tensor(content[b"data"]).reshape(-1, *_CIFAR_SHAPE)
        labels = torch.tensor(content[b"labels"], dtype=torch.int64)
    except ImportError as error:
        raise _missing_package("CIFAR-10", error) from error
    except Exception as error:
        # A damaged pickle raises almost any exception.
        raise PolicyError(
            f"{path} is no batch of CIFAR-10: {type(error).__name__}: {error}. Extract"
            " cifar-10-python.tar.gz again."
        ) from error
    if images.dtype is not torch.uint8 or labels.shape != images.shape[:1]:
        raise PolicyError(
            f"{path} is no batch of CIFAR-10: {images.dtype} images of shape {[*images.shape]} and"
            f" {[*labels.shape]} labels. Extract cifar-10-python.tar.gz again."
        )
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Load dicts, lists, numbers, bytes and NumPy arrays; refuse all that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the three names that a pickled array has."""
        import numpy as np  # noqa: PLC0415 - not a dependency of mezzo

        reconstruct = np.ndarray(0).__reduce__()[0]
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return allowed[module, name]


def read_text(folder: Path, length: int) -> tuple[Tensor, str]:
    """Return the bytes of all .txt files of a folder, and how many there are.

    `length` is that of the pieces which will be taken from the text.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise PolicyError(f"--data {folder}: the folder has no .txt files. Pass one that has.")
    joined = b"\n".join(path.read_bytes() for path in files)
    if len(joined) <= length:
        raise PolicyError(
            f"--data {folder}: its .txt files have {len(joined)} bytes. Pass a folder with more"
            f" than {length}, the length of a sequence."
        )
    text = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    return text, f"{len(joined)} bytes of {len(files)} text files"


def text_batch(text: Tensor, number: int, size: int, length: int) -> Batch:
    """Return random pieces of a text as tokens, and the tokens that follow."""
    starts = torch.randint(len(text) - length, (size, 1), generator=_generator(number))
    pieces = text[starts + torch.arange(length + 1)].long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def load_digits() -> LabeledImages:
    """Return scikit-learn's digits, enlarged from 8 × 8 to 32 × 32 pixels and three channels."""
    try:
        from sklearn.datasets import (  # noqa: PLC0415 - an extra
            load_digits as load,
        )
    except ImportError as error:
        raise _missing_package("the digits", error) from error
    pixels, digits = load(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) * (255 / 16)
    enlarged = F.interpolate(images, size=_CIFAR_SHAPE[1:], mode="bilinear").round().byte()
    enlarged, labels = enlarged.expand(-1, 3, -1, -1), torch.as_tensor(digits, dtype=torch.int64)
    is_test = torch.arange(len(labels)) % _DIGITS_PART == 0
    return LabeledImages(
        enlarged[~is_test],
        labels[~is_test],
        enlarged[is_test],
        labels[is_test],
        "scikit-learn's digits, 32 × 32 × 3",
    )


def _missing_package(what: str, error: ImportError) -> UnsupportedError:
    return UnsupportedError(
        f"{error.name} is not installed, which {what} need. Run: pip install 'mezzo[demo]'"
    )


# -- synthetic data --------------------------------------------------------------------------------


def painted_images(number: int, size: int, pixels: int, classes: int) -> Batch:
    """Return images with the coarse pattern of their class under noise, and their classes."""
    generator = _generator(number)
    labels = torch.randint(classes, (size,), generator=generator)
    noise = torch.randn(size, 3, pixels, pixels, generator=generator)
    pattern = F.interpolate(_patterns(classes)[labels], size=(pixels, pixels))
    return noise.add_(pattern), labels


def painted_boxes(number: int, size: int, layout: AnchorLayout, classes: int) -> Batch:
    """Return images with one to four rectangles in the color of their class, and their targets.

    The targets are a class and an offset for every anchor: see `match_anchors`.
    """
    generator = _generator(number)
    images = torch.rand(size, 3, layout.pixels, layout.pixels, generator=generator) - 0.5
    colors, anchors, targets = _patterns(classes).mean((2, 3)) * 4, layout.anchors(), []
    for image in images:
        count = int(torch.randint(1, 5, (), generator=generator))
        labels = torch.randint(classes, (count,), generator=generator)
        sides = 0.15 + 0.45 * torch.rand(count, 2, generator=generator)
        centers = sides / 2 + (1 - sides) * torch.rand(count, 2, generator=generator)
        corners = torch.cat([centers - sides / 2, centers + sides / 2], 1) * layout.pixels
        for (left, top, right, bottom), label in zip(corners.int().tolist(), labels, strict=True):
            image[:, top:bottom, left:right] += colors[label, :, None, None]
        targets.append(match_anchors(anchors, torch.cat([centers, sides], 1), labels))
    class_targets, offsets = (torch.stack(list(parts)) for parts in zip(*targets, strict=True))
    return images, class_targets, offsets


def random_tokens(number: int, size: int, length: int, vocabulary: int) -> Batch:
    """Return tokens of which, as in a text, some are far more frequent, and those that follow."""
    drawn = torch.rand(size, length + 1, generator=_generator(number))
    tokens = (vocabulary * drawn**4).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@cache
def _patterns(classes: int) -> Tensor:
    return torch.randn(classes, 3, 4, 4, generator=_generator(2**31))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
