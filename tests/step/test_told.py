"""What a step tells."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import mezzo
from mezzo.step.told import Board, Told

CPU = torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_does_in_tritons_interpreter_what_it_should() -> None:
    """Whether Triton interprets is settled when it is imported, so that a process of its own has to."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__).with_name("board_interpreted.py"))]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


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
