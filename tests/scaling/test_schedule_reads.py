"""Learning rates that are read, saved, loaded and set equal those of plain torch.

The reference is torch's own scheduler in a float32 run with the same skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.schedules import (
    READS,
    SCHEDULERS,
    OnDevice,
    Plain,
    Scaled,
    assert_read_alike,
    assert_trained_alike,
    drive,
)
from torch.optim import lr_scheduler

import mezzo


@pytest.fixture
def no_reads(host_reads: Callable[[], Any]) -> Callable[[], Any]:
    @contextmanager
    def stepping() -> Iterator[None]:
        with host_reads() as reads:
            yield
        assert reads.count == 0

    return stepping


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SCHEDULERS)
def test_random_actions_agree_with_plain_torch_and_steps_read_nothing(
    name, seed, far_cpu, no_reads
):
    drive(Scaled(SCHEDULERS[name]), Plain(SCHEDULERS[name]), seed, 40, no_reads)


def test_random_actions_on_a_cpu_agree_with_plain_torch():
    drive(Scaled(SCHEDULERS["SequentialLR"]), Plain(SCHEDULERS["SequentialLR"]), 0, 40)


def pair(name: str = "ExponentialLR") -> tuple[Scaled, Plain]:
    """Return a run that lags behind by three successful steps, and its reference."""
    run, plain = Scaled(SCHEDULERS[name]), Plain(SCHEDULERS[name])
    both_step(run, plain, 4)
    return run, plain


def both_step(run: Scaled, plain: Plain, count: int) -> None:
    for index in range(count):
        for one in (run, plain):
            one.step(bad=index == 1)


@pytest.mark.parametrize("read", READS)
def test_any_first_read_updates_everything(read, far_cpu):
    run, plain = pair()
    assert_read_alike(run, plain, read)
    assert_trained_alike(run, plain)


def test_reads_after_the_first_do_not_synchronize(far_cpu, host_reads):
    run, _ = pair("ChainedScheduler")
    with host_reads() as reads:
        for read in READS:
            if read != "scaler.state_dict":
                READS[read](run)
    assert reads.count == 1


def test_a_rate_is_up_to_date_before_it_is_multiplied(far_cpu):
    run, _ = pair("StepLR")
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.1
    assert [group["lr"] for group in run.optimizer.state_dict()["param_groups"]] == [
        0.1 * 0.5 * 0.1,
        0.05 * 0.5 * 0.1,
    ]


def test_a_step_without_the_scheduler_uses_the_current_rate(far_cpu):
    run, plain = pair()
    for parameter in run.model.parameters():
        parameter.grad = run.scaler.scale(torch.ones_like(parameter))
    run.scaler.step(run.optimizer)
    run.scaler.update()
    plain.optimizer.step()
    assert_trained_alike(run, plain)
    both_step(run, plain, 3)
    assert_read_alike(run, plain, "param_groups")
    assert_trained_alike(run, plain)


def test_another_scheduler_continues_from_the_rate_of_the_first(far_cpu):
    run, plain = pair()
    for one in (run, plain):
        one.first, one.scheduler = one.scheduler, lr_scheduler.StepLR(one.optimizer, 1, 0.3)
    both_step(run, plain, 3)
    assert type(run.first) is lr_scheduler.ExponentialLR
    assert_read_alike(run, plain, "scheduler.get_last_lr")
    for one in (run, plain):
        one.scheduler = one.first
    both_step(run, plain, 3)
    assert_read_alike(run, plain, "param_groups")
    assert_trained_alike(run, plain)


@pytest.mark.parametrize("enabled", [True, False])
def test_two_scalers_can_step_one_scheduler_alternately(enabled, far_cpu):
    run, plain = pair()
    scalers = run.scaler, mezzo.GradScaler(init_scale=2.0, dynamic=False, enabled=enabled)
    for index in (1, 0, 1):
        run.scaler = scalers[index]
        for one in (run, plain):
            one.step(bad=False)
    assert_read_alike(run, plain, "scaler.state_dict" if enabled else "param_groups")
    assert_trained_alike(run, plain)


def test_table_addresses_change_after_another_scaler_stepped_the_scheduler(far_cpu):
    run, plain = pair()
    first, run.scaler = run.scaler, mezzo.GradScaler(init_scale=2.0, dynamic=False)
    tables = first._schedules.before_replay()
    assert first._schedules.before_replay() == tables
    both_step(run, plain, 1)
    # A captured step would read the old table.
    assert first._schedules.before_replay() != tables
    assert_read_alike(run, plain, "param_groups")


def test_a_second_scheduler_that_the_user_steps_sees_current_rates(far_cpu):
    run, plain = pair()
    manual = [lr_scheduler.StepLR(one.optimizer, 1, 0.7) for one in (run, plain)]
    both_step(run, plain, 2)
    for scheduler in manual:
        scheduler.step()
    both_step(run, plain, 2)
    assert_read_alike(run, plain, "param_groups")


class ByEpoch:
    """A scheduler as in timm, whose step() takes an epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int) -> None:
        raise AssertionError("stepped")


class OwnStep(lr_scheduler.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


UNSUPPORTED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "one that is not torch's": ByEpoch,
    "one with a step of its own": lambda optimizer: OwnStep(optimizer, 1),
    "a list": lambda optimizer: [lr_scheduler.StepLR(optimizer, 1)],
}


@pytest.mark.parametrize("where", ["cpu", "a device", "disabled"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_scheduler_that_cannot_run_ahead_raises_before_anything_is_updated(
    name, where, monkeypatch, request
):
    if where == "a device":
        request.getfixturevalue("far_cpu")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = (
        OnDevice([weight], {"lr": 0.1, "momentum": 0.0})
        if where == "a device"
        else torch.optim.SGD([weight], lr=0.1)
    )
    scaler = mezzo.GradScaler(enabled=where != "disabled")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(mezzo.UnsupportedError, match=r"Do not pass it: call its step\(\) yourself"):
        scaler.step(optimizer, scheduler=UNSUPPORTED[name](optimizer))
    assert (weight.tolist(), len(optimizer.state)) == ([1.0, 1.0], 0)
    scaler.step(optimizer, scheduler=lr_scheduler.StepLR(optimizer, 1))
    assert weight.tolist() != [1.0, 1.0]


def test_a_scheduler_raises_with_another_optimizer_than_before():
    first, second = Scaled(SCHEDULERS["StepLR"]), Scaled(SCHEDULERS["StepLR"])
    first.step(bad=False)
    first.scheduler = second.scheduler
    second.scaler = first.scaler
    second.step(bad=False)
    with pytest.raises(mezzo.UnsupportedError, match="another optimizer"):
        first.step(bad=False)


def test_an_optimizer_that_takes_the_scaler_advances_its_scheduler_too():
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            if not sum(flag.item() for flag in grad_scaler._check_inf_per_device(self).values()):
                super().step(closure)

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Old([weight], lr=0.1), mezzo.GradScaler()
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    for boost in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * boost).backward()
        with pytest.warns(FutureWarning, match="grad_scaler"):
            scaler.step(optimizer, scheduler=scheduler)
        scaler.update()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.025)
