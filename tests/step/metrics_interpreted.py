"""The kernel that writes step metrics, in Triton's interpreter; `test_metrics.py` runs this."""

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
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_metrics_are_written_in_one_launch(
    dtype: torch.dtype, found_inf: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    scale = DeviceLossScale(
        mezzo.ScaleState(8.0, good_steps=3, skipped_steps=4, consecutive_skips=2), CPU
    )
    monkeypatch.setattr(capture, "device_counters", lambda _: scale.counters)
    metrics = MetricsBuffer(CPU, mezzo.GradScaler("cpu"))
    metrics.write(torch.tensor(1.5, dtype=dtype), torch.tensor(found_inf))
    assert metrics.read() == StepMetrics(1.5, skipped=bool(found_inf), scale=8.0, skipped_steps=4)
    assert metrics.scale_and_skips() == (8.0, 2)
    scale.scale.fill_(16.0)
    metrics.write(None, torch.tensor(1.0 - found_inf))
    assert metrics.read() == StepMetrics(1.5, skipped=not found_inf, scale=16.0, skipped_steps=4)
