"""A scheduler and an optimizer that lag behind are updated when they are read."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from mezzo import ScalerError
from mezzo.optim.fused_algorithms import algorithm_name
from mezzo.scaling.schedule_sync import (
    LaggingSchedule,
    catch_up,
    class_of,
    groups_of,
    is_synced_on_read,
    stop_sync,
    sync_on_read,
)


class CountingSchedule(LaggingSchedule):
    """A schedule that counts its updates."""

    def __init__(self) -> None:
        self.calls = 0
        self.changes = 0

    def catch_up(self) -> None:
        self.calls += 1

    def changed(self) -> None:
        self.changes += 1


class Pair:
    """An optimizer, its scheduler, and the schedule that both lag behind."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.scheduler = StepLR(self.optimizer, 2)
        self.schedule = CountingSchedule()

    def synced(self) -> Pair:
        sync_on_read(self.optimizer, [self.scheduler], self.schedule)
        return self


@pytest.fixture
def pair() -> Pair:
    return Pair()


SCHEDULER_READS: dict[str, Callable[[Any], Any]] = {
    "rates": lambda scheduler: scheduler.get_last_lr(),
    "state": lambda scheduler: scheduler.state_dict(),
    "epoch": lambda scheduler: scheduler.last_epoch,
    "loading": lambda scheduler: scheduler.load_state_dict({"last_epoch": 3}),
    "setting": lambda scheduler: setattr(scheduler, "gamma", 0.5),
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
}

OPTIMIZER_READS: dict[str, Callable[[Any], Any]] = {
    "groups": lambda optimizer: optimizer.param_groups,
    "new groups": lambda optimizer: setattr(
        optimizer, "param_groups", [dict(vars(optimizer)["param_groups"][0])]
    ),
    "state": lambda optimizer: optimizer.state_dict(),
    "loading": lambda optimizer: optimizer.load_state_dict(
        torch.optim.SGD([torch.ones(1)], lr=0.3).state_dict()
    ),
    "a group that is added": lambda optimizer: optimizer.add_param_group(
        {"params": [torch.zeros(2, requires_grad=True)]}
    ),
    "its text": repr,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "a plain step": lambda optimizer: optimizer.step(),
}


@pytest.mark.parametrize("read", SCHEDULER_READS)
def test_every_read_of_a_scheduler_updates_it_first(pair: Pair, read: str) -> None:
    SCHEDULER_READS[read](pair.synced().scheduler)
    assert pair.schedule.calls > 0
    assert pair.schedule.changes == (read in {"loading", "setting"})


@pytest.mark.parametrize("read", OPTIMIZER_READS)
def test_every_read_of_an_optimizer_updates_it_first(pair: Pair, read: str) -> None:
    OPTIMIZER_READS[read](pair.synced().optimizer)
    assert pair.schedule.calls > 0


def test_zero_grad_and_reads_inside_mezzo_do_not_update(pair: Pair) -> None:
    pair.synced()
    pair.weight.grad = torch.ones(1)
    pair.optimizer.zero_grad()
    assert pair.weight.grad is None
    pair.weight.grad = torch.ones(1)
    pair.optimizer.zero_grad(set_to_none=False)
    assert pair.weight.grad == 0
    assert groups_of(pair.optimizer)[0]["lr"] == 0.1
    with pair.schedule.without_sync():
        pair.optimizer.step()
        pair.scheduler.step()
        assert (pair.optimizer.param_groups[0]["lr"], pair.scheduler.last_epoch) == (0.1, 1)
    assert pair.schedule.calls == 0


def test_types_names_and_state_dicts_are_the_original_ones(pair: Pair) -> None:
    pair.synced()
    optimizer, scheduler = pair.optimizer, pair.scheduler
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(scheduler, StepLR)
    assert (type(optimizer).__name__, type(optimizer).__module__, type(scheduler).__qualname__) == (
        "SGD",
        "torch.optim.sgd",
        "StepLR",
    )
    assert repr(optimizer).startswith("SGD (")
    assert (class_of(optimizer), class_of(scheduler), algorithm_name(optimizer)) == (
        torch.optim.SGD,
        StepLR,
        torch.optim.SGD,
    )
    assert set(scheduler.state_dict()) == set(Pair().scheduler.state_dict())
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_have_the_original_class_and_work(pair: Pair, copied: Callable[[Any], Any]) -> None:
    pair.synced()
    optimizer, scheduler = copied(pair.optimizer), copied(pair.scheduler)
    assert (type(optimizer), type(scheduler)) == (torch.optim.SGD, StepLR)
    assert is_synced_on_read(pair.optimizer, pair.schedule)
    assert type(pair.optimizer) is not torch.optim.SGD
    calls = pair.schedule.calls
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.step()
    assert pair.schedule.calls == calls


def test_stop_sync_updates_both_and_restores_their_classes(pair: Pair) -> None:
    pair.synced()
    stop_sync(pair.optimizer)
    assert (type(pair.optimizer), type(pair.scheduler), pair.schedule.calls) == (
        torch.optim.SGD,
        StepLR,
        1,
    )
    assert not is_synced_on_read(pair.optimizer, pair.schedule)
    stop_sync(pair.optimizer)
    catch_up(pair.optimizer)
    pair.optimizer.step()
    pair.scheduler.step()
    assert pair.schedule.calls == 1


def test_classes_are_restored_even_if_the_update_raises(pair: Pair) -> None:
    pair.synced()

    def fail() -> None:
        raise OSError("broken")

    pair.schedule.catch_up = fail
    with pytest.raises(OSError, match="broken"):
        stop_sync(pair.optimizer)
    assert type(pair.optimizer) is torch.optim.SGD


def test_scheduler_step_raises_while_the_scaler_steps_it(pair: Pair) -> None:
    pair.synced()
    with pytest.raises(ScalerError, match=r"Remove scheduler\.step"):
        pair.scheduler.step()


def test_the_last_schedule_is_the_one_that_updates(pair: Pair) -> None:
    pair.synced()
    first, pair.schedule = pair.schedule, CountingSchedule()
    pair.synced()
    assert first.calls == 1
    pair.scheduler.get_last_lr()
    assert pair.optimizer.param_groups
    assert (first.calls, pair.schedule.calls) == (1, 2)


def test_the_parts_of_a_scheduler_are_updated_too(pair: Pair) -> None:
    first, second = LinearLR(pair.optimizer), StepLR(pair.optimizer, 3)
    scheduler = SequentialLR(pair.optimizer, [first, second], [2])
    sync_on_read(pair.optimizer, [scheduler, first, second], pair.schedule)
    first.get_last_lr()
    assert pair.schedule.calls == 1
    stop_sync(pair.optimizer)
    assert [type(one) for one in (scheduler, first, second)] == [SequentialLR, LinearLR, StepLR]


def test_an_optimizer_that_is_no_longer_used_is_freed() -> None:
    pair = Pair().synced()
    reference = weakref.ref(pair.optimizer)
    pair.schedule.optimizer = pair.optimizer
    del pair
    gc.collect()
    assert reference() is None


def test_groups_of_a_wrapper_that_computes_them_are_returned() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            return self.optimizer.param_groups

    optimizer = Pair().optimizer
    assert groups_of(Wrapper(optimizer)) is optimizer.param_groups
