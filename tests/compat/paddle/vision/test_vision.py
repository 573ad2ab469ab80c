"""`paddle.vision`: transforms of arrays, and MNIST from local files."""

from __future__ import annotations

import builtins
import gzip
import struct

import numpy as np
import pytest
import torch

import mezzo.compat.paddle.vision.transforms as T
from mezzo.compat import paddle
from mezzo.compat.paddle.vision.datasets import MNIST, FashionMNIST

IMAGE = np.arange(24, dtype="uint8").reshape(2, 4, 3)
DIGITS = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype="uint8")


def write_idx(path, values, magic):
    header = struct.pack(f">{1 + values.ndim}I", magic, *values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + values.tobytes()))
    return path


@pytest.fixture
def files(tmp_path):
    return {
        "image_path": write_idx(tmp_path / "images.gz", DIGITS, 2051),
        "label_path": write_idx(tmp_path / "labels.gz", np.arange(5, dtype="uint8"), 2049),
    }


def test_transpose_puts_channels_first():
    assert T.Transpose()(IMAGE).tolist() == IMAGE.transpose(2, 0, 1).tolist()
    assert T.Transpose()(IMAGE[..., 0]).shape == (1, 2, 4)
    assert T.Transpose(order=[1, 0, 2])(IMAGE).shape == (4, 2, 3)


def test_normalize_takes_numbers_for_each_channel():
    first = T.Normalize([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])(IMAGE.transpose(2, 0, 1))
    last = T.Normalize(mean=[1, 2, 3], std=[2, 2, 2], data_format="HWC")(IMAGE)
    assert first.dtype == np.float32
    assert first.tolist() == last.transpose(2, 0, 1).tolist()
    assert T.Normalize(0.0, 2.0)(IMAGE).max() == 11.5
    flipped = T.Normalize(data_format="HWC", to_rgb=True)(IMAGE)
    assert flipped.tolist() == IMAGE[..., ::-1].tolist()
    tensor = T.Normalize([0.5], [0.5])(T.ToTensor()(np.full((2, 2), 255, "uint8")))
    assert type(tensor) is paddle.Tensor
    assert tensor.tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    with pytest.raises(ValueError, match=r"2 means and 3 deviations.* 3 channels"):
        T.Normalize([1, 2], [1, 2, 3], data_format="HWC")(IMAGE)
    with pytest.raises(ValueError, match=r"data_format should be 'CHW' or 'HWC'"):
        T.Normalize(data_format="NCHW")


def test_to_tensor_scales_uint8_only():
    tensor = T.ToTensor()(IMAGE)
    assert (type(tensor), tensor.shape, tensor.dtype) == (paddle.Tensor, [3, 2, 4], torch.float32)
    assert tensor.max().item() == pytest.approx(23 / 255)
    assert T.ToTensor(data_format="HWC")(IMAGE.astype("float32")).max().item() == 23.0


def test_images_are_resized_and_flipped():
    assert T.Resize((4, 8))(IMAGE).shape == (4, 8, 3)
    assert T.Resize(4)(IMAGE[..., 0]).shape == (4, 8)
    assert T.Resize((2, 4))(IMAGE).tolist() == IMAGE.tolist()
    assert T.Resize((1, 1))(np.ones((2, 2), "float32")).dtype == np.float32
    with pytest.raises(ValueError, match=r"interpolation should be one of"):
        T.Resize(4, "cubic-spline")
    assert T.RandomHorizontalFlip(1.0)(IMAGE).tolist() == IMAGE[:, ::-1].tolist()
    assert T.RandomHorizontalFlip(0.0)(IMAGE).tolist() == IMAGE.tolist()


def test_transforms_are_composed_and_others_say_what_to_use():
    assert T.Compose([T.Transpose(), lambda image: image[0]])(IMAGE).shape == (2, 4)
    with pytest.raises(TypeError, match=r"A transform should be callable, got int: 3"):
        T.Compose([3])
    for module, name in [
        (T, "ColorJitter"),
        (paddle.vision.datasets, "Cifar10"),
        (paddle.vision, "models"),
    ]:
        with pytest.raises(AttributeError, match=rf"no {name}. Use torchvision"):
            getattr(module, name)


def test_digits_are_read_from_files(files):
    digits = MNIST(**files)
    image, label = digits[-1]
    assert len(digits) == 5
    assert (image.shape, image.dtype) == ((28, 28), np.uint8)
    assert image.tolist() == DIGITS[4].tolist()
    assert (label.shape, label.dtype, label[0]) == ((1,), np.int64, 4)
    image, _ = MNIST(**files, backend="cv2", transform=T.Transpose())[0]
    assert (image.shape, image.dtype) == ((1, 28, 28), np.float32)
    transform = T.Compose([T.Transpose(), T.Normalize([127.5], [127.5])])
    loader = paddle.io.DataLoader(MNIST(**files, transform=transform), batch_size=5)
    images, labels = next(iter(loader))
    assert (images.shape, labels.shape) == ([5, 1, 28, 28], [5, 1])
    assert -1 <= images.min() < images.max() <= 1


def test_files_are_found_where_paddle_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "paddle" / "dataset" / "fashion-mnist"
    write_idx(folder / "t10k-images-idx3-ubyte.gz", DIGITS, 2051)
    with pytest.raises(FileNotFoundError, match=r"needs .*fashion-mnist/t10k-labels-idx1-ubyte.gz"):
        FashionMNIST(mode="test")
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros(5, "uint8"), 2049)
    assert len(FashionMNIST(mode="test")) == 5
    with pytest.raises(
        FileNotFoundError, match=r"nothing is downloaded here. .*or pass image_path="
    ):
        MNIST()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a gzip file", "is not a complete gzip file"),
        (gzip.compress(b"\0" * 100)[:-9], "is not the idx file with magic number 2051"),
        (gzip.compress(struct.pack(">4I", 2051, 2, 28, 28) + b"\0" * 784), "2 samples .* fewer"),
        (gzip.compress(struct.pack(">4I", 2051, 1, 28, 28) + b"\0" * 785), "1 samples .* more"),
        (gzip.compress(struct.pack(">4I", 2051, 2**32 - 1, 28, 28)), "samples .* fewer"),
        (gzip.compress(struct.pack(">4I", 2051, 1, 14, 28)), r"samples of shape \[14, 28\]"),
        (gzip.compress(b"\0\0"), "magic number 2051"),
        (gzip.compress(struct.pack(">4I", 2051, 5, 28, 28) + DIGITS.tobytes())[:900], "gzip"),
    ],
    ids=["text", "magic", "fewer", "more", "claims 3 TB", "shape", "short header", "truncated"],
)
def test_a_damaged_file_raises_with_its_name(content, message, files):
    files["image_path"].write_bytes(content)
    with pytest.raises(ValueError, match=rf"images.gz.*{message}"):
        MNIST(**files)


def test_wrong_arguments_raise_in_paddles_words(files, tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=r"mode should be 'train' or 'test', but got valid"):
        MNIST(mode="valid")
    with pytest.raises(ValueError, match=r"Expected backend are one of \['pil', 'cv2'\]"):
        MNIST(**files, backend="numpy")
    labels = write_idx(tmp_path / "four.gz", np.zeros(4, "uint8"), 2049)
    with pytest.raises(ValueError, match=r"has 5 images and .* has 4 labels"):
        MNIST(files["image_path"], labels)
    imported = builtins.__import__

    def without_pil(name, *args, **kwargs):
        if name == "PIL":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pil)
    with pytest.raises(ImportError, match=r"needs the package Pillow"):
        MNIST(**files, backend="pil")[0]
