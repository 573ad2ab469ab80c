"""mezzo.compat.apex on a CUDA device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp, optimizers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def disable_casts_at_the_end() -> Iterator[None]:
    yield
    amp.initialize(nn.Linear(1, 1), enabled=False)


def make(kind: str = "FusedAdam") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 8),
    ).cuda()
    return model, getattr(optimizers, kind)(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x, y = (
            torch.randn(32, 3, 8, 8, generator=generator).cuda(),
            torch.randint(8, (32,), generator=generator).cuda(),
        )
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedLAMB", "FusedSGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_as_float32_does(level: str, kind: str) -> None:
    expected = train(*amp.initialize(*make(kind), opt_level="O0", verbosity=0), 8)
    assert train(*amp.initialize(*make(kind), opt_level=level, verbosity=0), 8) == pytest.approx(
        expected, abs=0.05
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_with_a_nonfinite_gradient_is_skipped(level: str) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale="dynamic", verbosity=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with amp.scale_loss(
        model(torch.full((4, 3, 8, 8), 1e30, device="cuda")).sum() * float("inf"), optimizer
    ) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)
    )
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0


def test_o2_resumes_from_saved_states() -> None:
    model, optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    continued = train(model, optimizer, 3)
    resumed, resumed_optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert train(resumed, resumed_optimizer, 3) == pytest.approx(continued, abs=1e-3)
