"""Captured steps free their memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import mezzo
from mezzo.scaling import check_unscale

pytestmark = pytest.mark.gpu


def _capture_and_drop(level: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        torch.optim.AdamW(model.parameters()),
        policy=level,
        dtype="float16",
    )
    x = torch.randn(64, 256, device="cuda")
    for _ in range(6):
        step(x, x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dropped_steps_leave_no_memory_and_no_tables(level: str) -> None:
    for _ in range(2):
        _capture_and_drop(level)
    gc.collect()
    before, tables = torch.cuda.memory_allocated(), len(check_unscale._captured)
    for _ in range(10):
        _capture_and_drop(level)
    gc.collect()
    assert len(check_unscale._captured) == tables
    # The tables of the last few gradients stay cached.
    assert torch.cuda.memory_allocated() - before < 2**20
