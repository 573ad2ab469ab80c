"""`paddle.vision.datasets`: MNIST and Fashion-MNIST from local files. Nothing is downloaded."""

from __future__ import annotations

import gzip
import os
import zlib
from math import prod
from pathlib import Path
from typing import Any

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.io import Dataset

__all__ = ["MNIST", "FashionMNIST"]

_SIDE = 28
_IMAGES, _LABELS = 2051, 2049
"""The first number of a file of images, and of labels: idx files of bytes with 3 and 1 axes."""
_MAX_RATIO = 1032
"""How many bytes gzip can make of one."""
_PREFIXES = {"train": "train", "test": "t10k"}


class MNIST(Dataset):
    """`paddle.vision.datasets.MNIST`: images of digits, read from local idx files.

    Without paths the files are those that Paddle keeps in `~/.cache/paddle/dataset/mnist`. Nothing
    is downloaded: a missing file raises.

    An image is a uint8 array of shape (28, 28), passed through `transform`; with `backend="cv2"` it
    is float32 before and after, and with `backend="pil"` a PIL image. A label is an int64 array of
    shape (1,).
    """

    NAME = "mnist"

    def __init__(
        self,
        image_path: str | os.PathLike[str] | None = None,
        label_path: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Any = None,
        download: bool = True,
        backend: str | None = None,
    ) -> None:
        if mode.lower() not in _PREFIXES:
            # Paddle's exception type.
            raise AssertionError(f"mode should be 'train' or 'test', but got {mode}.")
        if backend not in (None, "pil", "cv2"):
            raise ValueError(f"Expected backend are one of ['pil', 'cv2'], but got {backend}.")
        self.mode, self.transform, self.backend = mode.lower(), transform, backend
        self.image_path = self._find("image_path", image_path, "images-idx3-ubyte.gz")
        self.label_path = self._find("label_path", label_path, "labels-idx1-ubyte.gz")
        self.images = _read_idx(self.image_path, _IMAGES, (_SIDE, _SIDE))
        self.labels = _read_idx(self.label_path, _LABELS, ()).astype("int64")
        if len(self.images) != len(self.labels):
            raise ValueError(
                f"{self.image_path} has {len(self.images)} images and {self.label_path} has"
                f" {len(self.labels)} labels. Use two files of the same set."
            )

    def _find(self, argument: str, path: str | os.PathLike[str] | None, ending: str) -> Path:
        """Return the path of a file; raise with its place if it is not there."""
        name = f"{_PREFIXES[self.mode]}-{ending}"
        cached = Path("~/.cache/paddle/dataset").expanduser() / self.NAME / name
        found = cached if path is None else Path(path)
        if not found.is_file():
            raise FileNotFoundError(
                f"{type(self).__name__} needs {found}, which is not there, and nothing is"
                f" downloaded here. Put the file {name} there, or pass {argument}=."
            )
        return found

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.images[index], self.labels[index : index + 1 or None]
        if self.backend == "pil":
            image = _to_pil(image)
        elif self.backend == "cv2":
            image = image.astype("float32")
        if self.transform is not None:
            image = self.transform(image)
        return (image.astype("float32") if self.backend == "cv2" else image), label

    def __len__(self) -> int:
        return len(self.labels)


class FashionMNIST(MNIST):
    """`paddle.vision.datasets.FashionMNIST`, from `~/.cache/paddle/dataset/fashion-mnist`."""

    NAME = "fashion-mnist"


def _read_idx(path: Path, magic: int, sample: tuple[int, ...]) -> Any:
    """Return the values of a gzip file in idx format; its sizes are checked before it is read.

    The header has the magic number and one size for each axis, as big-endian 32-bit integers.
    """
    import numpy as np  # noqa: PLC0415 - the package can be imported without NumPy

    axes = 1 + len(sample)
    try:
        with gzip.open(path) as file:
            header = file.read(4 * (1 + axes))
            numbers = [int.from_bytes(header[at : at + 4]) for at in range(0, len(header), 4)]
            if len(header) != 4 * (1 + axes) or numbers[0] != magic:
                raise ValueError(f"{path} is not the idx file with magic number {magic}.")
            count, *shape = numbers[1:]
            if tuple(shape) != sample:
                raise ValueError(f"{path} has samples of shape {shape}, not {list(sample)}.")
            expected = count * prod(sample)
            # No file is larger when unpacked than its header may claim here, so that a short file
            # cannot claim 3 TB. One byte more shows whether the file is longer.
            values = file.read(min(expected, _MAX_RATIO * path.stat().st_size) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error
    if len(values) != expected:
        raise ValueError(
            f"{path} should have {count} samples by its header, and has"
            f" {'more' if len(values) > expected else 'fewer'}. Copy it again."
        )
    return np.frombuffer(values, np.uint8).reshape(count, *sample)


def _to_pil(image: Any) -> Any:
    try:
        from PIL import Image  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "backend='pil' needs the package Pillow. Install it, or leave backend out for arrays."
        ) from error
    return Image.fromarray(image, mode="L")


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
