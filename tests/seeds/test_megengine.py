"""Programs of MegEngine's guide to automatic mixed precision, on a smaller network."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import mezzo.compat.megengine as mge
import mezzo.compat.megengine.functional as F
from mezzo.compat.megengine import amp
from mezzo.compat.megengine.autodiff import GradManager
from mezzo.compat.megengine.optimizer import SGD


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


@pytest.fixture
def image():
    return mge.tensor(np.random.default_rng(0).normal(size=(2, 3, 16, 16)), dtype="float32")


@pytest.fixture
def label():
    return mge.tensor(np.zeros(2), dtype="int32")


def test_a_context_makes_the_output_float16(net, image):
    with amp.autocast():
        out = net(image)
    assert (out.dtype, net(image).dtype) == (torch.float16, torch.float32)


def test_a_decorated_function_computes_in_float16(net, image):
    @amp.autocast()
    def forward(x):
        return net(x)

    assert forward(image).dtype is torch.float16


def test_amp_enabled_makes_the_output_float16_until_it_is_reset(net, image):
    amp.enabled = True
    out = net(image)
    amp.enabled = False
    assert (out.dtype, net(image).dtype) == (torch.float16, torch.float32)


def record_output_gradient(dtypes):
    """Return a forward hook that appends the dtype of the output's gradient to a list."""
    return lambda _module, _inputs, output: (
        output.register_hook(lambda gradient: dtypes.append(gradient.dtype)) and None
    )


def test_automatic_scaled_backward_trains(net, image, label):
    gm = GradManager().attach(net.parameters())
    opt = SGD(net.parameters(), lr=0.01)
    scaler = amp.GradScaler()
    inner: list[torch.dtype] = []
    net.register_forward_hook(record_output_gradient(inner))

    @amp.autocast()
    def train_step(image, label):
        with gm:
            logits = net(image)
            loss = F.nn.cross_entropy(logits, label)
            scaler.backward(gm, loss)
        # Gradients of activations are float16; those of parameters are float32 and unscaled.
        assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}
        opt.step().clear_grad()
        return loss

    losses = [train_step(image, label).item() for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert set(inner) == {torch.float16}
    assert all(parameter.grad is None for parameter in net.parameters())
    assert (scaler.scale_factor, scaler.state_dict()["_growth_tracker"]) == (16.0, 30)


def test_automatic_skips_an_overflowing_step(net, image, label):
    gm = GradManager().attach(net.parameters())
    opt = SGD(net.parameters(), lr=0.01)
    scaler = amp.GradScaler(init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in net.parameters()]

    @amp.autocast()
    def train_step(image, label):
        with gm:
            loss = F.nn.cross_entropy(net(image), label)
            scaler.backward(gm, loss)
        opt.step().clear_grad()
        return loss

    assert math.isfinite(train_step(image, label).item())
    assert scaler.scale_factor == 2.0**59
    assert all(torch.equal(new, old) for new, old in zip(net.parameters(), before, strict=True))


def gradients_of(net, step):
    for parameter in net.parameters():
        parameter.grad = None
    step()
    return [parameter.grad.clone() for parameter in net.parameters()]


def test_manual_is_equivalent_to_automatic(net, image, label):
    gm = GradManager().attach(net.parameters())
    scaler = amp.GradScaler()

    @amp.autocast()
    def automatic():
        with gm:
            scaler.backward(gm, F.nn.cross_entropy(net(image), label))

    @amp.autocast()
    def manual():
        with gm:
            loss = F.nn.cross_entropy(net(image), label)
            gm.backward(loss, dy=mge.tensor(scaler.scale_factor))
        scaler.unscale(gm.attached_tensors())
        scaler.update()

    pairs = zip(gradients_of(net, automatic), gradients_of(net, manual), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert scaler.state_dict()["_growth_tracker"] == 2


def test_manual_accumulates_over_several_iterations(net, image, label):
    net.eval()
    gm = GradManager().attach(net.parameters())
    opt = SGD(net.parameters(), lr=0.01)
    scaler = amp.GradScaler()

    @amp.autocast()
    def accumulate(image, label):
        with gm:
            loss = F.nn.cross_entropy(net(image), label)
            gm.backward(loss, dy=mge.tensor(scaler.scale_factor))
        return loss

    def twice():
        accumulate(image[:1], label[:1])
        accumulate(image[1:], label[1:])
        scaler.unscale(gm.attached_tensors())
        scaler.update()

    def whole():
        with gm:
            gm.backward(2 * F.nn.cross_entropy(net(image), label))

    pairs = list(zip(gradients_of(net, whole), gradients_of(net, twice), strict=True))
    assert all(torch.allclose(first, second, rtol=1e-2, atol=1e-3) for first, second in pairs)
    before = net[5].weight.detach().clone()
    opt.step().clear_grad()
    assert not torch.equal(net[5].weight, before)


HUBCONF = """
import megengine.functional as F
import megengine.module as M

dependencies = ["megengine"]


class Network(M.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = M.Sequential(M.Conv2d(3, 8, 3, bias=False), M.BatchNorm2d(8), M.ReLU())
        self.fc = M.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(F.flatten(F.adaptive_avg_pool2d(self.stem(x), 1), 1))


def network(pretrained=False, **kwargs):
    return Network(**kwargs)
"""


def test_the_guide_runs_with_a_network_of_the_hub(tmp_path, monkeypatch, image, label):
    from mezzo.compat.megengine.hub import load

    monkeypatch.setenv("MGE_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "megengine_models_master"
    folder.mkdir(parents=True)
    (folder / "hubconf.py").write_text(HUBCONF)
    torch.manual_seed(0)
    net = load("megengine/models", "network", pretrained=False)
    gm = GradManager().attach(net.parameters())
    opt = SGD(net.parameters(), lr=0.1)
    scaler = amp.GradScaler()

    @amp.autocast()
    def train_step(image, label):
        with gm:
            logits = net(image)
            loss = F.nn.cross_entropy(logits, label)
            scaler.backward(gm, loss)
        opt.step().clear_grad()
        return logits, loss

    losses = [float(train_step(image, label)[1].numpy()) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert train_step(image, label)[0].dtype is torch.float16
