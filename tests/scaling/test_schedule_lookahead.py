"""A copy of a scheduler computes its future values; the scheduler itself does not change."""

from __future__ import annotations

import pytest
import torch
from support.schedules import known
from torch.optim import lr_scheduler

from mezzo import UnsupportedError
from mezzo.scaling.schedule_lookahead import (
    Lookahead,
    check_kind,
    check_scheduler,
    flat,
    scheduled_keys,
    spread,
)

MAKERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[4],
    ),
}


def new_scheduler(name: str) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW(
        [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.3}], lr=0.1
    )
    return optimizer, MAKERS[name](optimizer)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", MAKERS)
def test_the_rows_are_the_later_values_of_the_scheduler(name: str) -> None:
    optimizer, scheduler = new_scheduler(name)
    keys = scheduled_keys(scheduler)
    ahead = Lookahead(optimizer, scheduler, keys, first=0)
    before = flat(optimizer.param_groups, keys)
    ahead.extend(0, 12)
    assert flat(optimizer.param_groups, keys) == before
    assert known(scheduler.state_dict()) == known(new_scheduler(name)[1].state_dict())
    for good in range(12):
        assert ahead.row(good) == flat(optimizer.param_groups, keys)
        scheduler.step()


def test_past_rows_are_dropped_and_the_others_stay() -> None:
    optimizer, scheduler = new_scheduler("step")
    ahead = Lookahead(optimizer, scheduler, ("lr",), first=0)
    ahead.extend(0, 8)
    seventh = ahead.row(7)
    ahead.extend(5, 9)
    assert (ahead.first, ahead.row(7)) == (5, seventh)


def test_a_schedule_that_ends_keeps_its_last_row_and_raises_only_after_it() -> None:
    optimizer, scheduler = new_scheduler("one cycle")
    ahead = Lookahead(optimizer, scheduler, scheduled_keys(scheduler), first=0)
    ahead.extend(0, 100)
    assert ahead.row(99) == ahead.row(20)
    ahead.raise_beyond_end(20)
    with pytest.raises(ValueError, match="total steps"):
        ahead.raise_beyond_end(21)


def test_spread_is_the_inverse_of_flat() -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.8, 0.88)}]
    spread(iter([1, 2, 3, 4, 5, 6]), groups, ("lr", "betas"))
    assert groups == [{"lr": 1, "betas": (2, 3)}, {"lr": 4, "betas": (5, 6)}]


def test_a_cycled_momentum_is_scheduled() -> None:
    assert scheduled_keys(new_scheduler("one cycle")[1]) == ("lr", "betas")
    assert scheduled_keys(new_scheduler("cosine")[1]) == ("lr",)


def test_a_kind_of_scheduler_that_cannot_run_ahead_raises() -> None:
    optimizer, scheduler = new_scheduler("step")
    check_kind(optimizer, scheduler)
    with pytest.raises(UnsupportedError, match="another optimizer"):
        check_kind(new_scheduler("step")[0], scheduler)
    with pytest.raises(UnsupportedError, match="metric"):
        check_kind(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(UnsupportedError, match=r"StepLR is a class\. .* StepLR\(optimizer, "):
        check_kind(optimizer, lr_scheduler.StepLR)
    scheduler.step = lambda: None
    with pytest.raises(UnsupportedError, match=r"step\(\) of its own"):
        check_kind(optimizer, scheduler)


class WeightDecay(lr_scheduler.LRScheduler):
    """Changes the weight decay, from its third step on."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0 if self.last_epoch < 3 else 0.1
        return [group["lr"] for group in self.optimizer.param_groups]


class Uncopyable:
    """A function for a rate that cannot be copied."""

    def __call__(self, epoch: int) -> float:
        return 0.5**epoch

    def __reduce__(self) -> None:
        raise TypeError("cannot pickle a generator")


def test_a_check_runs_the_schedule_ahead() -> None:
    optimizer, scheduler = new_scheduler("step")
    check_scheduler(optimizer, scheduler)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)
    with pytest.raises(UnsupportedError, match=r"changes weight_decay.*Do not pass it"):
        check_scheduler(optimizer, WeightDecay(optimizer))
    with pytest.raises(UnsupportedError, match=r"LambdaLR cannot be copied.*Do not pass it"):
        check_scheduler(optimizer, lr_scheduler.LambdaLR(optimizer, Uncopyable()))
