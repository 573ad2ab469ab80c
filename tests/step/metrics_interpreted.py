"""The kernel that writes what a step tells, on a CPU: Triton interprets it. `test_told.py` runs these in a process of their own."""

from __future__ import annotations

import pytest
import torch

import mezzo
from mezzo import _launch
from mezzo.scaling import capture
from mezzo.scaling.scale_tensors import DeviceLossScale
from mezzo.step.metrics import MetricsBuffer, StepMetrics

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_the_numbers_arrive_in_one_launch(
    dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    scale = DeviceLossScale(
        mezzo.ScaleState(8.0, good_steps=3, skipped_steps=4, consecutive_skips=2), CPU
    )
    monkeypatch.setattr(capture, "device_counters", lambda _: scale.shown)
    board = MetricsBuffer(CPU, mezzo.GradScaler("cpu"))
    board.write(torch.tensor(1.5, dtype=dtype), torch.tensor(bad))
    assert board.read() == StepMetrics(1.5, skipped=bool(bad), scale=8.0, skipped_steps=4)
    assert board.scale_and_skips() == (8.0, 2)
    scale.scale.fill_(16.0)
    board.write(None, torch.tensor(1.0 - bad))
    assert board.read() == StepMetrics(1.5, skipped=not bad, scale=16.0, skipped_steps=4)
