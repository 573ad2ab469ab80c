"""Paddle's default place and static programs on CUDA, with nothing moved by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle import _places, static

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE, BATCH = 64, 16


@pytest.fixture(autouse=True)
def no_default_device(monkeypatch):
    monkeypatch.setattr(_places, "_default_device", None)


def test_the_default_place_is_the_gpu_and_torchs_default_device_stays():
    assert paddle.get_device() == "gpu:0"
    assert paddle.is_compiled_with_cuda()
    assert paddle.device.get_available_device()[:2] == ["cpu", "gpu:0"]
    assert paddle.nn.Linear(2, 2).weight.place == paddle.CUDAPlace(0)
    assert paddle.to_tensor([1.0]).place == paddle.CUDAPlace(0)
    assert torch.empty(1).device.type == "cpu"


def test_set_device_moves_new_tensors_to_the_cpu():
    assert paddle.set_device("cpu") == paddle.CPUPlace()
    assert paddle.nn.Linear(2, 2).weight.device.type == "cpu"
    assert torch.empty(1).device.type == "cpu"


def test_a_gpu_that_the_machine_lacks_raises():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"must inside \[0, {count}\), because GPU number on"):
        paddle.CUDAPlace(count)


def test_a_place_that_the_machine_lacks_is_the_gpu(monkeypatch):
    monkeypatch.setattr(_places, "_warned", set())
    with pytest.warns(UserWarning, match=r"NPUPlace\(0\).*Place\(gpu:0\) is used instead"):
        assert paddle.NPUPlace(0).device == torch.device("cuda", 0)


def test_the_device_module_reports_the_gpu():
    cuda = paddle.device.cuda
    place = paddle.CUDAPlace(0)
    assert cuda.device_count() == torch.cuda.device_count()
    assert cuda.get_device_capability(place) == torch.cuda.get_device_capability(0)
    assert cuda.get_device_name("gpu:0") == cuda.get_device_name(0) == torch.cuda.get_device_name(0)
    kept = torch.empty(1024, device="cuda")
    assert cuda.max_memory_allocated() >= cuda.memory_allocated(place) >= kept.nbytes
    assert cuda.max_memory_reserved() >= cuda.memory_reserved() > 0
    cuda.synchronize()
    paddle.device.synchronize()


def test_amp_is_supported_and_does_not_warn():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bfloat16 is emulated")
    assert paddle.amp.is_float16_supported("gpu:0")
    assert paddle.amp.is_bfloat16_supported()
    with warnings.catch_warnings(), paddle.amp.auto_cast(dtype="bfloat16"):
        assert paddle.nn.Linear(4, 4)(paddle.to_tensor(np.ones((2, 4), "float32"))).is_cuda


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.linears = paddle.nn.LayerList([paddle.nn.Linear(SIZE, SIZE) for _ in range(3)])

    def forward(self, x):
        x = self.linears[0](x)
        with paddle.static.amp.fp16_guard():
            return self.linears[2](self.linears[1](x))


class Rows(paddle.io.Dataset):
    def __getitem__(self, index):
        generator = np.random.default_rng(index)
        return generator.random(SIZE, "float32"), generator.random(SIZE, "float32")

    def __len__(self):
        return 4 * BATCH


def train(place, decorate):
    paddle.seed(0)
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup):
        model = Net()
        data = static.data(name="data", shape=[BATCH, SIZE], dtype="float32")
        label = static.data(name="label", shape=[BATCH, SIZE], dtype="float32")
        loss = paddle.nn.MSELoss()(model(data), label)
        optimizer = decorate(paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()))
        optimizer.minimize(loss)
    exe = static.Executor(place)
    exe.run(startup)
    if hasattr(optimizer, "amp_init"):
        optimizer.amp_init(place, scope=static.global_scope())
    losses = []
    for _ in range(3):
        for rows, labels in paddle.io.DataLoader(Rows(), batch_size=BATCH, drop_last=True)():
            feed = {data.name: rows, label.name: labels}
            losses += exe.run(program, feed=feed, fetch_list=[loss.name], use_program_cache=True)
    return model, losses


PROGRAMS = {
    "float32": (lambda optimizer: optimizer, np.float32),
    "O1": (lambda optimizer: static.amp.decorate(optimizer, init_loss_scaling=128.0), np.float32),
    "O2": (
        lambda optimizer: static.amp.decorate(
            optimizer, init_loss_scaling=128.0, use_pure_fp16=True, use_fp16_guard=False
        ),
        np.float16,
    ),
    "guard": (
        lambda optimizer: static.amp.decorate(
            optimizer, init_loss_scaling=128.0, use_pure_fp16=True, use_fp16_guard=True
        ),
        np.float32,
    ),
}


@pytest.mark.parametrize("make_place", [lambda: paddle.CUDAPlace(0), lambda: None], ids=["0", "-"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_static_program_trains_on_the_gpu(name, make_place):
    decorate, dtype = PROGRAMS[name]
    model, losses = train(make_place(), decorate)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda", 0)}
    assert {loss.dtype for loss in losses} == {np.dtype(dtype)}
    assert losses[-1] < losses[0]


def test_a_static_program_trains_on_the_cpu_place_although_layers_are_made_on_the_gpu():
    model, losses = train(paddle.CPUPlace(), PROGRAMS["float32"][0])
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert losses[-1] < losses[0]


def test_layers_of_torch_move_to_the_place_of_the_executor():
    program = static.Program()
    with static.program_guard(program, static.Program()):
        model = torch.nn.Linear(4, 2)
        out = model(static.data("x", [-1, 4]))
    exe = static.Executor(paddle.CUDAPlace(0))
    (value,) = exe.run(program, feed={"x": np.ones((3, 4), "float32")}, fetch_list=[out])
    assert value.shape == (3, 2)
    assert model.weight.is_cuda


def test_running_on_two_places_raises():
    program = static.Program()
    with static.program_guard(program, static.Program()):
        model = paddle.nn.Linear(4, 1)
        loss = model(static.data("x", [-1, 4])).mean()
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()).minimize(loss)
    feed = {"x": np.ones((2, 4), "float32")}
    static.Executor(paddle.CUDAPlace(0)).run(program, feed=feed)
    with pytest.raises(ValueError, match=r"on Place\(gpu:0\).*this run is on Place\(cpu\)"):
        static.Executor(paddle.CPUPlace()).run(program, feed=feed)


def test_a_model_of_torchs_layers_trains_on_the_default_place():
    model = paddle.Model(torch.nn.Linear(4, 1))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    model.prepare(optimizer, torch.nn.MSELoss(), amp_configs="O1")
    model.train_batch([np.ones((2, 4), "float32")], [np.ones((2, 1), "float32")])
    assert model.network.weight.is_cuda
