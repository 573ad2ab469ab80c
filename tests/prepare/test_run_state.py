"""`RunState` holds what a run needs beside model and optimizer, and refuses what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import assert_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import mezzo

X, Y = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(0, 1, 12).view(6, 2)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uni")


def make_step(seed: int = 0, **options) -> mezzo.TrainStep:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return mezzo.TrainStep(
        model, F.mse_loss, optimizer, "O2", dtype="float16", scheduler=scheduler, **options
    )


def save(step: mezzo.TrainStep, path: Path) -> None:
    model, optimizer = get_state_dict(step.model, step.optimizer)
    state = {"model": model, "optimizer": optimizer, "run": mezzo.RunState(step)}
    dcp.save(state, checkpoint_id=path)


def load(step: mezzo.TrainStep, path: Path) -> None:
    model, optimizer = get_state_dict(step.model, step.optimizer)
    state = {"model": model, "optimizer": optimizer, "run": mezzo.RunState(step)}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(step.model, step.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def test_a_step_resumes_from_a_distributed_checkpoint_bit_for_bit(tmp_path: Path):
    step, other = make_step(), make_step(seed=1)
    for _ in range(3):
        step(X, Y)
    save(step, tmp_path)
    load(other, tmp_path)
    assert_equal(other.state_dict(), step.state_dict())
    state = torch.get_rng_state()
    expected = [step(X, Y) for _ in range(3)]
    torch.set_rng_state(state)
    assert_equal([other(X, Y) for _ in range(3)], expected)


def test_a_step_that_a_distributed_checkpoint_loads_without_its_optimizer_is_refused(tmp_path):
    step = make_step()
    step(X, Y)
    dcp.save({"step": step}, checkpoint_id=tmp_path)
    with pytest.raises(mezzo.CheckpointError, match=r"1 updates, without the state of its AdamW"):
        dcp.load({"step": make_step(seed=1)}, checkpoint_id=tmp_path)


def test_accumulated_gradients_are_refused():
    step = make_step(accumulate=2)
    step(X, Y)
    with pytest.raises(mezzo.CheckpointError, match="gradients of 1 calls since its last update"):
        mezzo.RunState(step).state_dict()


def test_a_state_of_other_parts_is_refused_and_changes_nothing():
    scaler, other = mezzo.GradScaler(init_scale=8.0), mezzo.GradScaler(init_scale=2.0)
    state = mezzo.RunState(scaler=scaler).state_dict()
    scheduler = make_step()._scheduler
    for target, message in (
        (mezzo.RunState(make_step()), "has 1 scalers, and this RunState 0"),
        (mezzo.RunState(scaler=other, scheduler=scheduler), "has 0 schedulers, and this RunState"),
    ):
        with pytest.raises(mezzo.CheckpointError, match=message):
            target.load_state_dict(state)
    for damaged in ({}, {"run": b"PK"}, {"run": state["run"][:-100]}):
        with pytest.raises(mezzo.CheckpointError, match="not the state of a run"):
            mezzo.RunState(scaler=other).load_state_dict(damaged)
    assert other.get_scale() == 2.0


def test_what_is_not_a_step_is_refused():
    with pytest.raises(mezzo.CheckpointError, match="is not a training step"):
        mezzo.RunState(nn.Linear(1, 1))
    with pytest.raises(mezzo.CheckpointError, match="Pass the step alone"):
        mezzo.RunState(make_step(), scaler=mezzo.GradScaler())
