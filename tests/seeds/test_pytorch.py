"""The programs of a page on PyTorch's amp (T. Heo, "AMP(Automatic Mixed-Precision)"), which says `torch.cuda.amp`: the same calls, on mezzo by `install()`.

The host's own words (layers, data) are small enough for a CPU. There `torch.cuda.amp` is switched
off with a warning, as torch does it, so each program also runs with the names of `torch.cpu.amp`,
whose calls are the same.
"""

import importlib
import warnings

import pytest
import torch
from torch import nn, optim

import mezzo
from mezzo.compat import torch as dialect


@pytest.fixture(autouse=True)
def installed():
    with dialect.install():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        self.dtypes = []

    def forward(self, x):
        out = self.layers(x)
        self.dtypes.append(out.dtype)
        return out


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def batches(count=6, device=HERE):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(16, 3, 8, 8, generator=generator).to(device),
            torch.randint(10, (16,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def names(device):
    """`autocast` and `GradScaler` as the page imports them, quiet about their age."""
    amp = importlib.import_module(f"torch.{device}.amp")

    def quietly(kind):
        def call():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return kind()

        return call

    return quietly(amp.autocast), quietly(amp.GradScaler)


def in_float32(data):
    torch.manual_seed(0)
    model = Net().to(HERE)
    optimizer, losses = optim.SGD(model.parameters(), lr=0.05), []
    for input, target in data:  # noqa: A001 - the page's words
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(input), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_name_is_there():
    found = getattr(torch.cuda.amp, "autocast")  # noqa: B009 - as the page looks
    assert issubclass(found, mezzo.autocast)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_forward_under_autocast(device):
    autocast, _ = names(device)
    loss_fn, data, losses = nn.functional.cross_entropy, batches(), []
    torch.manual_seed(0)
    # Creates model and optimizer in default precision
    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for input, target in data:  # noqa: A001
        optimizer.zero_grad()
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
        # Backward runs outside.
        assert not torch.is_autocast_enabled(device)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert set(model.dtypes) == {torch.bfloat16 if device == "cpu" else torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses == pytest.approx(in_float32(data), abs=0.03)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_gradient_scaling(device):
    autocast, scaler_of = names(device)
    loss_fn, data, losses = nn.functional.cross_entropy, batches(), []
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = scaler_of()
    for input, target in data:  # noqa: A001
        optimizer.zero_grad()
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        assert model.layers[-1].bias.grad.abs().max() > 100.0  # scaled by 65536
        scaler.step(optimizer)
        assert model.layers[-1].bias.grad.abs().max() < 1.0  # unscaled before the update
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 65536.0
    assert losses == pytest.approx(in_float32(data), abs=0.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_page_runs_in_float32_and_is_told_so():
    data, losses = batches(), []
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = torch.amp.GradScaler()
    for input, target in data:  # noqa: A001
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match="CUDA is not available"):
            region = torch.autocast("cuda")
        with region:
            loss = nn.functional.cross_entropy(model(input), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses == in_float32(data)


def test_gradients_that_float16_loses_are_saved_by_scaling():
    # The page's reason for scaling: what is too small for float16 becomes zero, and its update is
    # lost.
    gradients = {}
    for scaled in (False, True):
        weight = nn.Parameter(torch.ones(2, 2))
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.mm(torch.eye(2), weight).float().sum() * 1e-9
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
        gradients[scaled] = weight.grad
    assert torch.equal(gradients[False], torch.zeros(2, 2))
    torch.testing.assert_close(gradients[True], torch.full((2, 2), 1e-9), rtol=1e-2, atol=0)
