"""The kernel that writes step metrics, in Triton's interpreter; `test_metrics.py` runs this."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mezzo
from mezzo import _launch
from mezzo.scaling import captured_scaler
from mezzo.scaling.gradient_counts import GradientCounts
from mezzo.scaling.scale_tensors import DeviceLossScale
from mezzo.step.metrics import MetricsBuffer, StepMetrics
from mezzo.step.step_history import HistoryIndex, StepHistory

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
    monkeypatch.setattr(captured_scaler, "device_counters", lambda _: scale.counters)
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
    monkeypatch.setattr(captured_scaler, "device_counters", lambda _: scale.counters)
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


def test_the_kernel_writes_a_row_of_the_history_for_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    scale = DeviceLossScale(mezzo.ScaleState(8.0), CPU)
    monkeypatch.setattr(captured_scaler, "device_counters", lambda _: scale.counters)
    counts = GradientCounts([torch.zeros(2), torch.zeros(3)])
    metrics = MetricsBuffer(CPU, mezzo.GradScaler("cpu"), computes_norm=True)
    metrics.record_to(history := StepHistory(CPU, counts, rows=4))
    rows: list[list[float]] = []
    for number in range(1, 8):
        if number == 2:
            counts.of(counts.parameters).add([torch.zeros(2), torch.tensor([1.0, torch.nan, 1.0])])
        if number > 3:
            metrics.write(torch.tensor(1.0), torch.tensor(0.0))
        else:
            flag = (torch.tensor(0.0), torch.tensor(1.0), None)[number - 1]
            square_sum = torch.tensor(25.0, dtype=torch.float64) if number == 2 else None
            metrics.write(None if number == 2 else torch.tensor(0.5), flag, square_sum=square_sum)
        if number in (1, 3, 5):
            rows += history.take(all_arrived=False).tolist()
    rows += history.take(all_arrived=True).tolist()
    first = rows[1].pop(HistoryIndex.FIRST)
    assert counts.first_parameter(first) == 1
    assert str(rows[0]) == "[1.0, 0.5, 0.0, 8.0, nan, 0.0, 1.0]"
    assert str(rows[1]) == "[2.0, nan, 1.0, 8.0, 5.0, 0.0]"
    assert str(rows[2]) == "[3.0, 0.5, -1.0, nan, nan, 0.0, 1.0]"
    assert [row[HistoryIndex.NUMBER] for row in rows] == list(range(1, 8))


def test_a_skip_that_the_host_decided_is_in_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones((), requires_grad=True))
    metrics = MetricsBuffer(CPU, scaler)
    metrics.record_to(history := StepHistory(CPU))
    metrics.write(torch.tensor(0.5), True)
    assert str(history.take(all_arrived=True).tolist()) == "[[1.0, 0.5, 1.0, 4.0, nan, 0.0, 1.0]]"
    assert metrics.read().skipped
