"""What a step tells."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted

import mezzo
from mezzo.step.told import Board, Told

CPU = torch.device("cpu")


@needs_triton
def test_the_kernel_does_in_tritons_interpreter_what_it_should() -> None:
    run_interpreted(Path(__file__).with_name("board_interpreted.py"))


def test_before_the_first_step_only_the_scale_is_known():
    assert Board(CPU, None).read() == Told(0.0, skipped=False, scale=1.0, skips=0)
    assert Board(CPU, mezzo.GradScaler("cpu", init_scale=4.0)).read().scale == 4.0


def test_a_call_without_an_update_tells_its_loss_alone():
    board = Board(CPU, None)
    board.write(torch.tensor(3.0), None)
    assert board.read() == Told(3.0, skipped=False, scale=1.0, skips=0)


def test_an_update_tells_scale_and_skips():
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum() * float("inf")).backward()
    bad = scaler.step(optimizer).skipped
    scaler.update()
    board = Board(CPU, scaler)
    board.write(torch.tensor(2.0), bad)
    assert board.read() == Told(2.0, skipped=True, scale=2.0, skips=1)


def test_a_loss_that_is_not_finite_is_said_once():
    board = Board(CPU, None)
    board.write(torch.tensor(float("nan")), False)
    with pytest.warns(UserWarning, match="nothing skips such steps"):
        board.speak()
    board.speak()


def test_with_a_scaler_nobody_is_warned():
    board = Board(CPU, mezzo.GradScaler("cpu"))
    board.write(torch.tensor(float("nan")), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.speak()
