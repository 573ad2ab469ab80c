"""What a step tells."""

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
def test_the_kernel_does_in_tritons_interpreter_what_it_should() -> None:
    run_interpreted(Path(__file__).with_name("metrics_interpreted.py"))


def test_before_the_first_step_only_the_scale_is_known():
    assert MetricsBuffer(CPU, None).read() == StepMetrics(
        0.0, skipped=False, scale=1.0, skipped_steps=0
    )
    assert MetricsBuffer(CPU, mezzo.GradScaler("cpu", init_scale=4.0)).read().scale == 4.0


def test_a_call_without_an_update_tells_its_loss_alone():
    board = MetricsBuffer(CPU, None)
    board.write(torch.tensor(3.0), None)
    assert board.read() == StepMetrics(3.0, skipped=False, scale=1.0, skipped_steps=0)


def test_an_update_tells_scale_and_skips():
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum() * float("inf")).backward()
    bad = scaler.step(optimizer).skipped
    scaler.update()
    board = MetricsBuffer(CPU, scaler)
    board.write(torch.tensor(2.0), bad)
    assert board.read() == StepMetrics(2.0, skipped=True, scale=2.0, skipped_steps=1)


def test_a_loss_that_is_not_finite_is_said_once():
    board = MetricsBuffer(CPU, None)
    board.write(torch.tensor(float("nan")), False)
    with pytest.warns(UserWarning, match="no GradScaler is used"):
        board.warn_if_nonfinite()
    board.warn_if_nonfinite()


def test_with_a_scaler_nobody_is_warned():
    board = MetricsBuffer(CPU, mezzo.GradScaler("cpu"))
    board.write(torch.tensor(float("nan")), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.warn_if_nonfinite()
