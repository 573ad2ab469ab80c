"""Learning rates of a step with a scheduler: as with plain torch, after any sequence of reads.

Also saves, loads and manual changes, and schedulers that are not supported.
"""

from __future__ import annotations

import pytest
import torch
from support.schedules import (
    READS,
    SCHEDULERS,
    Plain,
    Stepped,
    assert_read_alike,
    assert_trained_alike,
    drive,
    numbers,
    summed,
)
from support.step_models import Made, boosted
from torch import nn
from torch.optim import lr_scheduler

import mezzo
from mezzo import _launch


@pytest.fixture
def asynchronous_cpu(monkeypatch):
    """Treat the CPU as a device from which a read synchronizes."""
    monkeypatch.setattr(_launch, "needs_sync", lambda _: True)


def fixed_scaler() -> mezzo.GradScaler:
    """Return a scaler whose first steps are not skipped."""
    return mezzo.GradScaler(init_scale=4.0, dynamic=False)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_sequence_agrees_with_plain_torch(name, asynchronous_cpu):
    drive(Stepped(SCHEDULERS[name]), Plain(SCHEDULERS[name]), 1, 40)


def test_any_sequence_on_a_cpu_agrees_with_plain_torch():
    drive(Stepped(SCHEDULERS["SequentialLR"]), Plain(SCHEDULERS["SequentialLR"]), 2, 40)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("read", READS)
def test_any_first_read_agrees_with_plain_torch(read, asynchronous, request):
    if asynchronous:
        request.getfixturevalue("asynchronous_cpu")
    run, plain = Stepped(SCHEDULERS["ExponentialLR"]), Plain(SCHEDULERS["ExponentialLR"])
    for bad in (False, True, False, False):
        run.step(bad=bad)
        plain.step(bad=bad)
    assert_read_alike(run, plain, read)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_checkpoint_holds_the_learning_rate_and_a_resumed_run_uses_it(
    name, tmp_path, asynchronous_cpu
):
    run, plain = Stepped(SCHEDULERS[name]), Plain(SCHEDULERS[name])
    for bad in (False, False, True, False):
        run.step(bad=bad)
        plain.step(bad=bad)
    parts = ("model", "optimizer", "scaler", "scheduler")
    mezzo.save_checkpoint(tmp_path / "run.pt", **{part: getattr(run, part) for part in parts})
    saved = torch.load(tmp_path / "run.pt", weights_only=True)["optimizer"][0]["param_groups"]
    assert numbers(saved) == numbers(plain.optimizer.param_groups)
    resumed = Stepped(SCHEDULERS[name])
    # The loaded state replaces a step whose result the host has not read yet.
    resumed.step(bad=False)
    mezzo.load_checkpoint(tmp_path / "run.pt", **{part: getattr(resumed, part) for part in parts})
    assert_read_alike(resumed, plain, "param_groups")
    for bad in (False, True, False):
        resumed.step(bad=bad)
        plain.step(bad=bad)
    assert_trained_alike(resumed, plain)
    assert_read_alike(resumed, plain, "optimizer.state_dict")


def test_two_optimizers_have_their_own_schedulers(asynchronous_cpu):
    models = [nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    schedulers = [
        lr_scheduler.ExponentialLR(optimizer, gamma)
        for optimizer, gamma in zip(optimizers, (0.5, 0.1), strict=True)
    ]

    @mezzo.train_step(
        models=models,
        optimizers=optimizers,
        policy="O2",
        dtype="float16",
        scheduler=schedulers,
        scaler=fixed_scaler(),
    )
    def step(x, boosts):
        return sum((model(x) * boost).sum() for model, boost in zip(models, boosts, strict=True))

    ones = torch.ones(1, 3)
    for boosts in ((1.0, 1.0), (1.0, 1.0), (float("inf"), 1.0)):
        step(ones, torch.tensor(boosts))
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [
        0.5**2,
        0.1 * 0.1 * 0.1,
    ]


def test_an_optimizer_without_a_fused_step_can_have_a_scheduler_in_float16(asynchronous_cpu):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
    plain = torch.optim.RMSprop(nn.Linear(3, 2).parameters(), lr=0.1)
    expected = lr_scheduler.OneCycleLR(plain, 0.5, total_steps=20)
    step = mezzo.TrainStep(
        model, summed, optimizer, "O2", dtype="float16", scheduler=scheduler, scaler=fixed_scaler()
    )
    for boost in (1.0, float("inf"), 1.0):
        step(torch.ones(1, 3), torch.tensor(boost))
    for _ in range(2):
        plain.step()
        expected.step()
    assert numbers(optimizer.param_groups) == numbers(plain.param_groups)


def test_a_scheduler_can_move_to_a_step_without_a_scaler(asynchronous_cpu):
    made = Made("mlp")
    scheduler = lr_scheduler.ExponentialLR(made.optimizer, 0.5)
    x, y = torch.ones(2, 8), (torch.zeros(2, dtype=torch.long), torch.tensor(1.0))
    for dtype, scaler in (("float16", fixed_scaler()), ("bfloat16", None)):
        step = mezzo.TrainStep(
            made.model,
            boosted,
            made.optimizer,
            "O2",
            dtype=dtype,
            scheduler=scheduler,
            scaler=scaler,
            channels_last=False,
        )
        step(x, y)
        step(x, y)
        mezzo.undecorate(made.model)
    assert (scheduler.get_last_lr(), scheduler.last_epoch) == ([0.05 * 0.5**4], 4)
    assert type(scheduler) is lr_scheduler.ExponentialLR


class ByEpoch:
    """Like timm's: it has an optimizer, and its step() takes an epoch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch):
        raise AssertionError("stepped")


class Decaying(lr_scheduler.StepLR):
    """Changes the weight decay too."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return super().get_lr()


UNSUPPORTED = {
    "ReduceLROnPlateau": (lr_scheduler.ReduceLROnPlateau, "decides by a metric"),
    "not torch's": (ByEpoch, "not one of torch"),
    "changes the weight decay": (
        lambda optimizer: Decaying(optimizer, 1),
        "changes weight_decay",
    ),
    "a string": (lambda _: "cosine", "not one of torch"),
}


STEPS = {
    "TrainStep": lambda made, kwargs: mezzo.TrainStep(
        made.model, boosted, made.optimizer, **kwargs
    ),
    "train_step": lambda made, kwargs: mezzo.train_step(
        models=made.model, optimizers=made.optimizer, **kwargs
    )(lambda x: made.model(x).sum()),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_scheduler_that_cannot_run_ahead_is_refused_when_the_step_is_made(name, kind, dtype):
    make, reason = UNSUPPORTED[name]
    made = Made("mlp")
    scheduler = make(made.optimizer)
    with pytest.raises(
        mezzo.UnsupportedError, match=rf"{reason}.*Do not pass it: call its step\(\) yourself"
    ):
        STEPS[kind](made, {"policy": "O2", "dtype": dtype, "scheduler": scheduler})
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float32}
    assert not hasattr(made.optimizer, "_bound")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_schedulers_for_one_optimizer_are_refused(dtype):
    made = Made("mlp")
    schedulers = [
        lr_scheduler.ExponentialLR(made.optimizer, 0.9),
        lr_scheduler.StepLR(made.optimizer, 3),
    ]
    with pytest.raises(
        mezzo.PolicyError,
        match=r"ExponentialLR and StepLR for the same optimizer.*ChainedScheduler",
    ):
        mezzo.TrainStep(
            made.model, boosted, made.optimizer, "O2", dtype=dtype, scheduler=schedulers
        )
