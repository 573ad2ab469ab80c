"""`paddle.vision.transforms` on NumPy arrays of images, with channels last."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import Tensor, as_tensor, plain_tensor, to_tensor

__all__ = ["Compose", "Normalize", "RandomHorizontalFlip", "Resize", "ToTensor", "Transpose"]

_MODES = {"bilinear": "bilinear", "nearest": "nearest", "bicubic": "bicubic", "area": "area"}
"""Interpolation: Paddle's names that torch has too."""


class Compose:
    """`paddle.vision.transforms.Compose`: apply transforms one after the other.

    >>> import numpy
    >>> image = numpy.full((28, 28), 255, dtype="uint8")
    >>> transformed = Compose([Transpose(), Normalize([127.5], [127.5])])(image)
    >>> transformed.shape, float(transformed.max())
    ((1, 28, 28), 1.0)
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        for transform in transforms:
            if not callable(transform):
                raise TypeError(
                    f"A transform should be callable, got {type(transform).__name__}:"
                    f" {transform!r}."
                )
        self.transforms = list(transforms)

    def __call__(self, data: Any) -> Any:
        """Return transformed data."""
        for transform in self.transforms:
            data = transform(data)
        return data


@dataclass(frozen=True)
class Transpose:
    """`paddle.vision.transforms.Transpose`: channels first, (H, W, C) to (C, H, W) by default.

    An image without channels gets one.
    """

    order: Sequence[int] = (2, 0, 1)

    def __call__(self, img: Any) -> Any:
        """Return a transposed image."""
        return _with_channels(img).transpose(self.order)


@dataclass(frozen=True)
class Normalize:
    """`paddle.vision.transforms.Normalize`: `(image - mean) / std` for each channel, float32.

    One number stands for three channels, as in Paddle. Channels are first unless
    `data_format="HWC"`.
    """

    mean: Any = 0.0
    std: Any = 1.0
    data_format: str = "CHW"
    to_rgb: bool = False
    keys: Any = None

    def __post_init__(self) -> None:
        if self.data_format not in ("CHW", "HWC"):
            raise ValueError(f"data_format should be 'CHW' or 'HWC', got {self.data_format!r}.")

    def __call__(self, img: Any) -> Any:
        """Return a normalized image: an array, or a tensor for a tensor."""
        channels = -1 if self.data_format == "HWC" else 0
        if isinstance(img, torch.Tensor):
            array = self._normalize(plain_tensor(img).cpu().numpy(), channels)
            return as_tensor(torch.from_numpy(array).to(img.device))
        return self._normalize(_to_array(img), channels)

    def _normalize(self, image: Any, axis: int) -> Any:
        if self.to_rgb:
            image = image[..., ::-1] if axis else image[::-1]
        mean, std = (_per_channel(value, image.ndim, axis) for value in (self.mean, self.std))
        count = image.shape[axis]
        if any(value.size not in (1, count) for value in (mean, std)):
            raise ValueError(
                f"Normalize has {mean.size} means and {std.size} deviations, and an image of shape"
                f" {list(image.shape)} has {count} channels with data_format={self.data_format!r}."
            )
        return (image.astype("float32") - mean) / std


@dataclass(frozen=True)
class ToTensor:
    """`paddle.vision.transforms.ToTensor`: a tensor with channels first; uint8 becomes 0 to 1."""

    data_format: str = "CHW"
    keys: Any = None

    def __call__(self, img: Any) -> Tensor:
        """Return a tensor of an image."""
        image = _with_channels(img)
        if self.data_format == "CHW":
            image = image.transpose(2, 0, 1)
        scaled = image.astype("float32") / 255.0 if image.dtype == "uint8" else image
        # Loaders move whole batches to the default place, so a single image stays on the CPU.
        return to_tensor(scaled.copy(), place="cpu")


@dataclass(frozen=True)
class Resize:
    """`paddle.vision.transforms.Resize`: to (height, width), or the shorter side to a size."""

    size: Any
    interpolation: str = "bilinear"
    keys: Any = None

    def __post_init__(self) -> None:
        if self.interpolation not in _MODES:
            raise ValueError(
                f"interpolation should be one of {', '.join(_MODES)}, got {self.interpolation!r}."
            )

    def __call__(self, img: Any) -> Any:
        """Return a resized image of the same dtype."""
        image = _to_array(img)
        height, width = image.shape[:2]
        if isinstance(self.size, int):
            ratio = self.size / min(height, width)
            target = (max(self.size, int(height * ratio)), max(self.size, int(width * ratio)))
        else:
            target = tuple(self.size)
        planes = torch.from_numpy(_with_channels(image).transpose(2, 0, 1)[None].astype("float32"))
        resized = torch.nn.functional.interpolate(planes, target, mode=self.interpolation)
        result = resized[0].permute(1, 2, 0).numpy()
        if image.dtype == "uint8":
            result = result.round().clip(0, 255)
        return result.reshape(*target, *image.shape[2:]).astype(image.dtype)


@dataclass(frozen=True)
class RandomHorizontalFlip:
    """`paddle.vision.transforms.RandomHorizontalFlip`: flip left and right at random."""

    prob: float = 0.5
    keys: Any = field(default=None)

    def __call__(self, img: Any) -> Any:
        """Return the image or its mirror image."""
        image = _to_array(img)
        is_flipped = random.random() < self.prob  # noqa: S311 - not for secrets
        return image[:, ::-1].copy() if is_flipped else image


def _to_array(value: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - the package can be imported without NumPy

    return np.asarray(value)


def _with_channels(img: Any) -> Any:
    """Return an image as an array with a channel axis."""
    image = _to_array(img)
    return image[..., None] if image.ndim == 2 else image


def _per_channel(value: Any, ndim: int, axis: int) -> Any:
    """Return means or deviations in a shape that broadcasts along the channel axis."""
    array = _to_array(value).astype("float32").reshape(-1)
    shape = [1] * ndim
    shape[axis] = array.size
    return array.reshape(shape)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
