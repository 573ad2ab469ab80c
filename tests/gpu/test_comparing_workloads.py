"""The built-in workloads of `mezzo compare` on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.comparing.builtin_workloads import WORKLOADS, load_workload
from mezzo.comparing.detector import detection_loss
from mezzo.comparing.paddle_runs import run_programs
from mezzo.comparing.workload import Preset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_loss_of_a_small_workload_is_that_of_the_cpu(name: str) -> None:
    workload = load_workload(name, Preset.SMALL)
    torch.manual_seed(0)
    model = workload.make_model()
    batch = workload.make_batch(0)
    expected = workload.loss(model, batch).item()
    moved = tuple(value.cuda() for value in batch)
    assert workload.loss(model.cuda(), moved).item() == pytest.approx(expected, rel=1e-2)
    if workload.evaluate is not None:
        assert 0.0 <= workload.evaluate(model.eval()) <= 1.0


class Head(nn.Module):
    """Scores of 81 classes and four offsets for each anchor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 85)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.linear(x)
        return both[..., :81], both[..., 81:]


def test_the_loss_of_a_detector_can_be_captured_at_6132_anchors() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6132, 16, generator=generator).cuda()
    is_positive = torch.rand(8, 6132, generator=generator) < 0.01
    classes = (torch.randint(1, 81, (8, 6132), generator=generator) * is_positive).cuda()
    targets = torch.randn(8, 6132, 4, generator=generator).cuda()

    def loss_of(outputs: Any, *expected: torch.Tensor) -> torch.Tensor:
        return detection_loss(*outputs, *expected)

    losses = []
    for capture in (False, True):
        torch.manual_seed(0)
        model = Head().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = mezzo.TrainStep(model, loss_of, optimizer, "O0", capture=capture)
        losses.append([float(step(x, (classes, targets))) for _ in range(8)])
        assert step.captured is capture
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_programs_of_paddle_run_and_their_precisions_agree() -> None:
    result = run_programs(Preset.SMALL, "cuda", 4)
    assert all(mode.peak_bytes for mode in result.modes)
    losses = {mode.mode: mode.loss for mode in result.modes}
    assert losses["dynamic O1"] == pytest.approx(losses["dynamic float32"], rel=1e-3)
    assert losses["static float32"] == pytest.approx(losses["dynamic float32"], rel=1e-5)
