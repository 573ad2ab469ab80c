"""mezzo.compat.megengine on a CUDA device: its default device is the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import mezzo.compat.megengine as mge
import mezzo.compat.megengine.functional as F
import mezzo.compat.megengine.module as M
from mezzo.compat.megengine import amp, device
from mezzo.compat.megengine.autodiff import GradManager
from mezzo.compat.megengine.optimizer import SGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def restore_defaults() -> Iterator[None]:
    yield
    mge.set_default_device("xpux")
    device._warned.clear()


def train(net: nn.Module, steps: int = 10) -> list[float]:
    gm = GradManager().attach(net.parameters())
    opt, scaler = SGD(net.parameters(), lr=0.1), amp.GradScaler()
    image = mge.tensor(np.random.default_rng(0).normal(size=(8, 3, 16, 16)), dtype="float32")
    label = mge.tensor(np.zeros(8), dtype="int32")
    assert {image.device.type, label.device.type} == {"cuda"}

    @amp.autocast()
    def step() -> torch.Tensor:
        with gm:
            loss = F.nn.cross_entropy(net(image), label)
            scaler.backward(gm, loss)
        opt.step().clear_grad()
        return loss

    return [float(step().numpy()) for _ in range(steps)]


def test_layers_and_tensors_are_on_the_gpu_without_a_call() -> None:
    torch.manual_seed(0)
    net = M.Sequential(
        M.Conv2d(3, 8, 3), M.BatchNorm2d(8), M.ReLU(), M.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    assert {tensor.device.type for tensor in net.state_dict().values()} == {"cuda"}
    losses = train(net)
    assert losses[-1] < losses[0]
    assert torch.zeros(1).device.type == "cpu"


def test_data_follow_a_network_on_the_cpu_with_one_warning() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    with pytest.warns(UserWarning, match="The network is on cpu") as warned:
        losses = train(net)
    assert len(warned) == 1
    assert losses[-1] < losses[0]


def test_names_of_devices() -> None:
    assert mge.tensor([1.0], device="cpu0").device.type == "cpu"
    assert mge.tensor([1.0]).to("cpu0").to("gpu0").device == torch.device("cuda", 0)
    mge.set_default_device("cpux")
    assert mge.tensor([1.0]).device.type == M.Linear(1, 1).weight.device.type == "cpu"
    assert mge.is_cuda_available()
    assert mge.get_device_count("gpu") == torch.cuda.device_count()
