"""MegEngine's default device: the GPU where there is one, without a change of torch's."""

import runpy
import sys

import pytest
import torch

import mezzo.compat.megengine as mge
from mezzo.compat.megengine import _tensor, device


@pytest.fixture(autouse=True)
def restore_default():
    yield
    device.set_default_device("xpux")
    device._warned.clear()


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("xpux", "cuda:1"),
        ("gpux", "cuda:1"),
        ("gpu0", "cuda:0"),
        ("xpu0", "cuda:0"),
        ("gpu0:1", "cuda:0"),
        ("cpu0", "cpu"),
        ("multithread4", "cpu"),
    ],
)
def test_names_of_devices_with_gpus(two_gpus, name, expected):
    assert device.parse_device(name) == torch.device(expected)
    assert (mge.get_device_count("gpu"), mge.is_cuda_available()) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_name_is_the_cpu_with_one_warning():
    assert mge.get_default_device() == "xpux"
    assert mge.tensor([1.0]).device.type == "cpu"
    with pytest.warns(UserWarning, match="'gpu0' is a GPU, and this machine has none"):
        mge.set_default_device("gpu0")
    assert mge.get_default_device() == "gpu0"
    assert mge.tensor([1.0]).to("gpu1").device.type == "cpu"
    assert (mge.get_device_count("gpu"), mge.get_device_count("xpu")) == (0, 1)


@pytest.mark.parametrize("name", ["cuda", "gpu", "tpu0", 3, ""])
def test_invalid_names_are_refused_and_the_default_stays(name):
    with pytest.raises(AssertionError, match=r"Invalid device name.*'xpux', 'gpu0'"):
        mge.set_default_device(name)
    assert mge.get_default_device() == "xpux"


def test_devices_that_torch_has_not_are_refused():
    with pytest.raises(RuntimeError, match="There is no cambricon device here"):
        mge.set_default_device("cambricon0")
    with pytest.raises(AssertionError, match="got 'tpu'"):
        mge.get_device_count("tpu")


def test_the_environment_chooses_the_default(monkeypatch):
    monkeypatch.setenv("MGE_DEFAULT_DEVICE", "cpu0")
    assert runpy.run_path(device.__file__)["get_default_device"]() == "cpu0"


def test_new_tensors_layers_and_parameters_are_placed_on_the_default_device(monkeypatch):
    # The meta device takes the place of a GPU.
    monkeypatch.setattr(device, "parse_device", lambda _: torch.device("meta"))
    for module in (_tensor, sys.modules["mezzo.compat.megengine.functional.tensor"]):
        monkeypatch.setattr(module, "parse_device", lambda _: torch.device("meta"))
    made = [
        mge.tensor([1.0]),
        mge.Parameter([1.0]),
        mge.functional.zeros(2),
        mge.module.Linear(2, 2).weight,
        mge.module.BatchNorm2d(2).running_mean,
    ]
    assert {tensor.device.type for tensor in made} == {"meta"}
    assert torch.get_default_device().type == "cpu"
    assert torch.zeros(1).device.type == "cpu"


def test_data_follow_a_network_that_is_not_on_the_default_device(monkeypatch):
    monkeypatch.setattr(_tensor, "default_device", lambda: torch.device("meta"))
    x = torch.ones(2, 3, device="meta").as_subclass(mge.Tensor)
    weight = torch.nn.Parameter(torch.ones(4, 3))
    assert _tensor._network_device((x, weight), {}) == torch.device("cpu")
    assert _tensor._network_device((x, x), {}) is None
    assert not _tensor._may_move(weight)
    monkeypatch.setattr(mge.Tensor, "to", lambda self, place: torch.zeros(self.shape, device=place))
    with pytest.warns(UserWarning, match=r"The network is on cpu.*default device is meta"):
        (moved, same), kept = _tensor._move_data(((x, weight), {"bias": None}), torch.device("cpu"))
    assert (moved.device.type, same is weight, kept) == ("cpu", True, {"bias": None})


def test_an_op_on_two_devices_is_repeated_on_that_of_the_network(monkeypatch):
    monkeypatch.setattr(_tensor, "default_device", lambda: torch.device("meta"))
    monkeypatch.setattr(mge.Tensor, "to", lambda self, place: torch.ones(self.shape, device=place))
    x = torch.ones(3, device="meta").as_subclass(mge.Tensor)
    weight = torch.nn.Parameter(torch.ones(3))

    def product(left, right):
        if left.device != right.device:
            raise RuntimeError("Expected all tensors to be on the same device")
        return (left * right).sum()

    with pytest.warns(UserWarning, match="The network is on cpu"):
        assert mge.Tensor.__torch_function__(product, (mge.Tensor,), (x, weight)).item() == 3.0
    assert mge.Tensor.__torch_function__(product, (mge.Tensor,), (x, weight)).item() == 3.0
