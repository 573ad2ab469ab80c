"""The kernel that writes step metrics, in Triton's interpreter; `test_metrics.py` runs this."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_writes_the_rate_and_the_norm_without_a_scaler(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    metrics = MetricsBuffer(CPU, None, rate=0.5, computes_norm=True)
    hyper = torch.tensor([[0.1, 0.2], [1.0, 1.0]], dtype=dtype)
    metrics.write(
        torch.tensor(1.5), False, rate=hyper, square_sum=torch.tensor(25.0, dtype=torch.float64)
    )
    rate = 0.1 if dtype is torch.float64 else torch.tensor(0.1).item()
    expected = StepMetrics(1.5, skipped=False, scale=1.0, skipped_steps=0, rate=rate, grad_norm=5.0)
    assert metrics.read() == expected
    # A call without an update, or a flush without a loss, leaves the other metrics as they are.
    metrics.write(torch.tensor(2.5), None)
    assert metrics.read() == replace(expected, loss=2.5)
    metrics.write(None, False, rate=hyper * 2, square_sum=torch.zeros((), dtype=torch.float64))
    assert metrics.read() == replace(expected, loss=2.5, rate=2 * rate, grad_norm=0.0)


def test_the_kernel_writes_the_rate_and_the_norm_with_a_scaler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    scale = DeviceLossScale(mezzo.ScaleState(8.0, skipped_steps=4, consecutive_skips=2), CPU)
    monkeypatch.setattr(capture, "device_counters", lambda _: scale.counters)
    metrics = MetricsBuffer(CPU, mezzo.GradScaler("cpu"), computes_norm=True)
    metrics.write(
        torch.tensor(1.5),
        torch.tensor(1.0),
        rate=torch.tensor([0.25], dtype=torch.float64),
        square_sum=torch.tensor(torch.inf, dtype=torch.float64),
    )
    assert metrics.read() == StepMetrics(
        1.5, skipped=True, scale=8.0, skipped_steps=4, rate=0.25, grad_norm=torch.inf
    )


def test_a_loss_on_another_device_is_copied_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    metrics = MetricsBuffer(CPU, None)
    metrics._device = torch.device("meta")
    metrics.write(torch.tensor(1.5), False, rate=torch.tensor([0.25]))
    assert (metrics.read().loss, metrics.read().rate) == (1.5, 0.25)
