"""Paddle's tensors, layers and loader on a GPU, which is their default place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle import _places

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def no_default_device(monkeypatch):
    monkeypatch.setattr(_places, "_default_device", None)


class Pairs(paddle.io.Dataset):
    def __getitem__(self, index):
        return np.full(64, index, "float32"), np.full(64, index, "float32")

    def __len__(self):
        return 32


def make_net():
    paddle.seed(0)
    return paddle.nn.Sequential(
        paddle.nn.Linear(64, 64),
        paddle.nn.ReLU(),
        paddle.nn.LayerNorm(64),
        paddle.nn.Linear(64, 64),
    )


def test_tensors_and_parameters_are_made_on_the_gpu():
    net = make_net()
    made = [paddle.to_tensor([1.0]), paddle.randn([2]), paddle.arange(3), *net.parameters()]
    assert {tensor.device.type for tensor in made} == {"cuda"}
    assert paddle.nn.BatchNorm2D(2).running_mean.is_cuda
    assert repr(made[0].place) == "Place(gpu:0)"


def test_losses_gradients_and_states_become_arrays():
    net = make_net()
    loss = net(paddle.ones([2, 64])).sum()
    loss.backward()
    assert np.isfinite(loss.numpy())
    assert net[0].weight.grad.numpy().shape == (64, 64)
    assert {type(value.numpy()) for value in net.state_dict().values()} == {np.ndarray}
    assert "place=Place(gpu:0)" in repr(loss)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_the_gpu(workers):
    batches = list(paddle.io.DataLoader(Pairs(), batch_size=8, num_workers=workers))
    assert {part.device.type for batch in batches for part in batch} == {"cuda"}
    assert batches[1][0][:, 0].tolist() == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]


def test_a_tensor_moves_in_place():
    x = paddle.to_tensor([1.0], place="cpu")
    assert x._to(paddle.CUDAPlace(0)) is x
    assert x.is_cuda
    assert x.to("cpu").device.type == "cpu"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_layers_train_with_a_scaler(level):
    net = make_net()
    optimizer = paddle.optimizer.Adam(learning_rate=1e-3, parameters=net.parameters())
    net, optimizer = paddle.amp.decorate(net, optimizer, level=level)
    scaler, losses = paddle.amp.GradScaler(init_loss_scaling=1024.0), []
    x = paddle.rand([32, 64])
    for _ in range(10):
        with paddle.amp.auto_cast(level=level):
            loss = paddle.nn.functional.mse_loss(net(x), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_a_step_with_layers_is_captured():
    net = make_net()
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=net.parameters())

    @mezzo.train_step(models=net, optimizers=optimizer, policy="O2", dtype="bfloat16", capture=True)
    def step(x, y):
        loss = paddle.nn.functional.mse_loss(net(x), y)
        loss.backward()
        return loss

    x = paddle.rand([32, 64])
    losses = [float(step(x, x)) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_to_static_compiles_for_the_gpu():
    net = make_net()
    x = paddle.rand([8, 64])
    expected = net(x)
    result = paddle.jit.to_static(net)(x)
    assert type(result) is paddle.Tensor
    assert torch.allclose(result, expected, atol=1e-3)
