"""Programs of a blog page on `torch.cuda.amp` (T. Heo, "AMP(Automatic Mixed-Precision)").

The calls are the page's; `install()` makes them run on mezzo. Layers and data are small enough for
a CPU. Without a GPU torch disables `torch.cuda.amp` with a warning, so each program also runs with
`torch.cpu.amp`, which has the same calls.
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


def amp_classes(device):
    """Return `autocast` and `GradScaler` as the page imports them, without FutureWarnings."""
    amp = importlib.import_module(f"torch.{device}.amp")

    def without_warnings(cls):
        def construct():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return cls()

        return construct

    return without_warnings(amp.autocast), without_warnings(amp.GradScaler)


def float32_losses(data):
    torch.manual_seed(0)
    model = Net().to(HERE)
    optimizer, losses = optim.SGD(model.parameters(), lr=0.05), []
    for input, target in data:  # noqa: A001 - the page's name
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(input), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_install_replaces_the_name_that_the_page_looks_up():
    replaced = getattr(torch.cuda.amp, "autocast")  # noqa: B009 - as on the page
    assert issubclass(replaced, mezzo.autocast)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_autocast_program_reaches_the_losses_of_float32(device):
    autocast, _ = amp_classes(device)
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
        # The page runs backward outside of the region.
        assert not torch.is_autocast_enabled(device)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert set(model.dtypes) == {torch.bfloat16 if device == "cpu" else torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses == pytest.approx(float32_losses(data), abs=0.03)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_grad_scaler_program_reaches_the_losses_of_float32(device):
    autocast, make_scaler = amp_classes(device)
    loss_fn, data, losses = nn.functional.cross_entropy, batches(), []
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = make_scaler()
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
    assert losses == pytest.approx(float32_losses(data), abs=0.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_runs_in_float32_with_a_warning():
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
    assert losses == float32_losses(data)


def test_loss_scaling_keeps_gradients_that_underflow_in_float16():
    # The page's reason for scaling: gradients too small for float16 become zero, and their updates
    # are lost.
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
