"""A copy of a scheduler runs ahead and tells the values to come; the scheduler itself stands still."""

from __future__ import annotations

import pytest
import torch
from support.schedules import known
from torch.optim import lr_scheduler

from mezzo import UnsupportedError
from mezzo.scaling.schedule_lookahead import Lookahead, check, flat, refuse, scheduled_keys, spread

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


def made(name: str) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW(
        [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.3}], lr=0.1
    )
    return optimizer, MAKERS[name](optimizer)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", MAKERS)
def test_the_rows_are_what_the_scheduler_itself_comes_to(name: str) -> None:
    optimizer, scheduler = made(name)
    keys = scheduled_keys(scheduler)
    ahead = Lookahead(optimizer, scheduler, keys, first=0)
    before = flat(optimizer.param_groups, keys)
    ahead.extend(0, 12)
    assert flat(optimizer.param_groups, keys) == before
    assert known(scheduler.state_dict()) == known(made(name)[1].state_dict())
    for good in range(12):
        assert ahead.row(good) == flat(optimizer.param_groups, keys)
        scheduler.step()


def test_what_is_behind_is_forgotten_and_the_rest_stays_in_place() -> None:
    optimizer, scheduler = made("step")
    ahead = Lookahead(optimizer, scheduler, ("lr",), first=0)
    ahead.extend(0, 8)
    seventh = ahead.row(7)
    ahead.extend(5, 9)
    assert (ahead.first, ahead.row(7)) == (5, seventh)


def test_a_schedule_that_ends_keeps_its_last_row_and_raises_only_beyond() -> None:
    optimizer, scheduler = made("one cycle")
    ahead = Lookahead(optimizer, scheduler, scheduled_keys(scheduler), first=0)
    ahead.extend(0, 100)
    assert ahead.row(99) == ahead.row(20)
    ahead.refuse_beyond_end(20)
    with pytest.raises(ValueError, match="total steps"):
        ahead.refuse_beyond_end(21)


def test_numbers_are_spread_where_they_were_taken_from() -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": (0.8, 0.88)}]
    spread(iter([1, 2, 3, 4, 5, 6]), groups, ("lr", "betas"))
    assert groups == [{"lr": 1, "betas": (2, 3)}, {"lr": 4, "betas": (5, 6)}]


def test_a_cycled_momentum_is_scheduled_too() -> None:
    assert scheduled_keys(made("one cycle")[1]) == ("lr", "betas")
    assert scheduled_keys(made("cosine")[1]) == ("lr",)


def test_what_cannot_run_ahead_is_refused_with_the_remedy() -> None:
    optimizer, scheduler = made("step")
    refuse(optimizer, scheduler)
    with pytest.raises(UnsupportedError, match="another optimizer"):
        refuse(made("step")[0], scheduler)
    with pytest.raises(UnsupportedError, match="metric"):
        refuse(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer))
    scheduler.step = lambda: None
    with pytest.raises(UnsupportedError, match=r"step\(\) of its own"):
        refuse(optimizer, scheduler)


class WeightDecay(lr_scheduler.LRScheduler):
    """Changes more than rates, from its third step on."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0 if self.last_epoch < 3 else 0.1
        return [group["lr"] for group in self.optimizer.param_groups]


class Uncopied:
    """A rate that cannot be copied."""

    def __call__(self, epoch: int) -> float:
        return 0.5**epoch

    def __reduce__(self) -> None:
        raise TypeError("cannot pickle a generator")


def test_a_check_finds_what_only_running_ahead_shows() -> None:
    optimizer, scheduler = made("step")
    check(optimizer, scheduler)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)
    with pytest.raises(UnsupportedError, match=r"changes weight_decay.*Do not pass it"):
        check(optimizer, WeightDecay(optimizer))
    with pytest.raises(UnsupportedError, match=r"LambdaLR cannot be copied.*Do not pass it"):
        check(optimizer, lr_scheduler.LambdaLR(optimizer, Uncopied()))
