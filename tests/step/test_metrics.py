"""Step metrics: what is written and read, and warnings about the loss."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted

import mezzo
from mezzo.step.metrics import MetricsBuffer, StepMetrics

CPU = torch.device("cpu")


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("metrics_interpreted.py"))


def test_before_the_first_step_only_the_scale_is_known():
    assert MetricsBuffer(CPU, None).read() == StepMetrics(
        0.0, skipped=False, scale=1.0, skipped_steps=0
    )
    assert MetricsBuffer(CPU, mezzo.GradScaler("cpu", init_scale=4.0)).read().scale == 4.0


def test_a_call_without_an_update_writes_its_loss_only():
    metrics = MetricsBuffer(CPU, None)
    metrics.write(torch.tensor(3.0), None)
    assert metrics.read() == StepMetrics(3.0, skipped=False, scale=1.0, skipped_steps=0)


def test_an_update_writes_scale_and_skips():
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum() * float("inf")).backward()
    found_nonfinite = scaler.step(optimizer).skipped
    scaler.update()
    metrics = MetricsBuffer(CPU, scaler)
    metrics.write(torch.tensor(2.0), found_nonfinite)
    assert metrics.read() == StepMetrics(2.0, skipped=True, scale=2.0, skipped_steps=1)
    assert metrics.scale_and_skips() == (2.0, 1)


def test_a_nonfinite_loss_without_a_scaler_is_warned_about_once():
    metrics = MetricsBuffer(CPU, None)
    metrics.write(torch.tensor(float("nan")), False)
    with pytest.warns(UserWarning, match="The loss is nan and no GradScaler is used"):
        metrics.warn_if_nonfinite()
    metrics.warn_if_nonfinite()


def test_a_nonfinite_loss_with_a_scaler_is_not_warned_about():
    metrics = MetricsBuffer(CPU, mezzo.GradScaler("cpu"))
    metrics.write(torch.tensor(float("nan")), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.warn_if_nonfinite()
