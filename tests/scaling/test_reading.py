"""A scheduler that is behind catches up whenever somebody reads it, and is a plain one in every copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from mezzo import ScalerError
from mezzo.scaling.reading import keep_up, let_go, plainly


@pytest.fixture
def scheduler() -> StepLR:
    return StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 2)


READS = {
    "rates": lambda scheduler: scheduler.get_last_lr(),
    "state": lambda scheduler: scheduler.state_dict(),
    "epoch": lambda scheduler: scheduler.last_epoch,
    "loading": lambda scheduler: scheduler.load_state_dict(vars(scheduler) | {}),
    "a copy": copy.copy,
    "a pickle": pickle.dumps,
}


@pytest.mark.parametrize("read", READS)
def test_every_way_to_read_it_lets_it_catch_up_first(scheduler: StepLR, read: str) -> None:
    calls = []
    keep_up(scheduler, lambda: calls.append(read))
    READS[read](scheduler)
    assert calls
    let_go(scheduler)
    assert type(scheduler) is StepLR


def test_it_looks_like_what_it_was(scheduler: StepLR) -> None:
    keep_up(scheduler, lambda: None)
    assert isinstance(scheduler, StepLR)
    assert type(scheduler).__name__ == "StepLR"
    assert type(copy.copy(scheduler)) is StepLR


def test_stepping_it_by_hand_is_refused_while_somebody_else_does(scheduler: StepLR) -> None:
    keep_up(scheduler, lambda: None)
    with pytest.raises(ScalerError, match=r"Remove scheduler\.step"):
        scheduler.step()
    scheduler.optimizer.step()
    with plainly(scheduler):
        scheduler.step()
        assert scheduler.last_epoch == 1
    with pytest.raises(ScalerError, match="Remove"):
        scheduler.step()


def test_letting_go_of_a_plain_one_changes_nothing(scheduler: StepLR) -> None:
    let_go(scheduler)
    assert type(scheduler) is StepLR


def test_whoever_keeps_it_last_is_asked(scheduler: StepLR) -> None:
    calls = []
    keep_up(scheduler, lambda: calls.append("first"))
    keep_up(scheduler, lambda: calls.append("second"))
    scheduler.get_last_lr()
    assert calls == ["second"]
