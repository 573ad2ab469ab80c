"""Places and the default device."""

from __future__ import annotations

import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle import _places


@pytest.fixture(autouse=True)
def no_default_device(monkeypatch):
    monkeypatch.setattr(_places, "_default_device", None)


@pytest.mark.parametrize(
    ("place", "device"),
    [
        (paddle.CPUPlace(), "cpu"),
        (paddle.CUDAPlace(1), "cuda:1"),
        (paddle.XPUPlace(0), "xpu:0"),
        ("gpu", "cuda"),
        ("gpu:2", "cuda:2"),
        ("cuda:0", "cuda:0"),
        (torch.device("cpu"), "cpu"),
    ],
    ids=str,
)
def test_a_place_or_name_gives_a_torch_device(place, device):
    assert _places.device_of(place) == torch.device(device)


@pytest.mark.parametrize("place", ["gpu0", "abacus", "gpu:", 3], ids=str)
def test_an_invalid_place_raises(place):
    with pytest.raises(
        ValueError, match=r"The device must be a string such as 'cpu', 'gpu', 'gpu:0'"
    ):
        _places.device_of(place)


def test_places_print_paddles_names():
    assert repr(paddle.CUDAPlace(0)) == "Place(gpu:0)"
    assert repr(paddle.CPUPlace()) == "Place(cpu)"


def test_set_device_sets_the_default_device():
    assert paddle.set_device("cpu") == paddle.CPUPlace()
    assert paddle.get_device() == "cpu"
    assert _places.device_of(None) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_setting_a_missing_gpu_raises():
    assert not paddle.is_compiled_with_cuda()
    with pytest.raises(
        ValueError, match=r"The device should not be 'gpu', since there is no CUDA device here"
    ):
        paddle.set_device("gpu")
