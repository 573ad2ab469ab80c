"""Schedulers, and runs whose rates are compared with those of plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import mezzo
from mezzo.optim.binding import optimizer_binding
from mezzo.scaling.schedule_sync import groups_of

Make = Callable[[torch.optim.Optimizer], LRScheduler]

SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 13, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, [0.2, 0.4], total_steps=200, cycle_momentum=False
    ),
    "OneCycleLR with momentum": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.4], total_steps=200),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.97**e, lambda e: 1.0 / (1 + e)]),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 20)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 6), lr_scheduler.ExponentialLR(o, 0.95)], o
    ),
}
"""All that differ in how they compute a rate: from the epoch, from the last rate, by a cycle, or
by other schedulers."""


class Run:
    """An optimizer over two groups with its scheduler; every gradient is one."""

    momentum = 0.9

    def __init__(self, make: Make, device: str = "cpu") -> None:
        self.make, self.device = make, device
        self.model = nn.Linear(3, 2).to(device)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.optimizer = self.build(
            [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.05}]
        )
        self.scheduler = make(self.optimizer)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=self.momentum)

    def step(self, *, bad: bool) -> None:
        raise NotImplementedError

    def again(self) -> Run:
        """A new run, as after a restart, that goes on from this one's state."""
        raise NotImplementedError

    def exact(self) -> list[torch.Tensor]:
        return [parameter.detach().float().cpu() for parameter in self.model.parameters()]


class Plain(Run):
    """Plain torch in float32, which is told what to skip."""

    def step(self, *, bad: bool) -> None:
        if not bad:
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.scheduler.step()

    def again(self) -> Plain:
        made = type(self)(self.make, self.device)
        for name in ("model", "optimizer", "scheduler"):
            getattr(made, name).load_state_dict(copy.deepcopy(getattr(self, name).state_dict()))
        return made


class OnDevice(torch.optim.Optimizer):
    """SGD that skips by itself and reads its rates where they are, as torch's fused ones do on CUDA."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale, found = (
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", torch.tensor(0.0)),
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad if scale is None else parameter.grad / scale
                state = self.state[parameter]
                old = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                new = old * group["momentum"] + gradient
                good = found == 0
                parameter.copy_(torch.where(good, parameter - group["lr"] * new, parameter))
                old.copy_(torch.where(good, new, old))


class Scaled(Run):
    """`scaler.step(optimizer, scheduler=scheduler)`."""

    def __init__(self, make: Make, device: str = "cpu") -> None:
        super().__init__(make, device)
        self.scaler = mezzo.GradScaler(init_scale=4.0, dynamic=False)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return OnDevice(groups, {"lr": 0.1, "momentum": self.momentum})

    def step(self, *, bad: bool) -> None:
        for parameter in self.model.parameters():
            parameter.grad = self.scaler.scale(
                torch.full_like(parameter, float("inf") if bad else 1.0)
            )
        self.scaler.step(self.optimizer, scheduler=self.scheduler)
        self.scaler.update()
        self.optimizer.zero_grad()

    def again(self) -> Scaled:
        made = type(self)(self.make, self.device)
        for name in ("model", "optimizer", "scaler", "scheduler"):
            getattr(made, name).load_state_dict(copy.deepcopy(getattr(self, name).state_dict()))
        return made


def summed(outputs: torch.Tensor, boost: torch.Tensor) -> torch.Tensor:
    return (outputs * boost).sum()


class Stepped(Run):
    """A float16 `TrainStep` over float32 master weights."""

    def __init__(self, make: Make, device: str = "cpu", **words: Any) -> None:
        super().__init__(make, device)
        self.scaler, self.words = mezzo.GradScaler(init_scale=4.0, dynamic=False), words
        words = {"dtype": "float16", "channels_last": False, "scaler": self.scaler, **words}
        self.train = mezzo.TrainStep(
            self.model, summed, self.optimizer, "O2", scheduler=self.scheduler, **words
        )
        self.ones = torch.ones(1, 3, device=device)
        self.boosts = [torch.tensor(boost, device=device) for boost in (1.0, float("inf"))]

    def step(self, *, bad: bool) -> None:
        self.train(self.ones, self.boosts[bad])

    def again(self) -> Stepped:
        made = Stepped(self.make, self.device, **self.words)
        made.train.load_state_dict(copy.deepcopy(self.train.state_dict()))
        return made

    def exact(self) -> list[torch.Tensor]:
        masters = optimizer_binding(self.optimizer).masters
        return [masters.read(parameter).detach().cpu() for parameter in self.model.parameters()]


READS: dict[str, Callable[[Any], Any]] = {
    "param_groups": lambda run: run.optimizer.param_groups,
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "scheduler.get_last_lr": lambda run: run.scheduler.get_last_lr(),
    "scheduler.state_dict": lambda run: run.scheduler.state_dict(),
    "scheduler.last_epoch": lambda run: getattr(run.scheduler, "last_epoch", None),
    "scaler.state_dict": lambda run: run.scaler.state_dict(),
}


def numbers(groups: list[dict[str, Any]]) -> list[Any]:
    return [(group["lr"], group["momentum"]) for group in groups]


def known(state: Any) -> Any:
    """A scheduler's state without the functions in it."""
    if isinstance(state, dict):
        return {key: known(value) for key, value in state.items() if not callable(value)}
    return (
        [known(value) for value in state if not callable(value)]
        if isinstance(state, list)
        else state
    )


def assert_read_alike(run: Any, plain: Plain, read: str) -> None:
    """Whatever is read first, everything shows what plain torch shows."""
    READS[read](run)
    # As they are: what was read has brought all the others up to date.
    assert numbers(groups_of(run.optimizer)) == numbers(plain.optimizer.param_groups), read
    assert known(run.scheduler.state_dict()) == known(plain.scheduler.state_dict()), read
    assert run.scheduler.get_last_lr() == plain.scheduler.get_last_lr(), read
    assert numbers(run.optimizer.state_dict()["param_groups"]) == numbers(
        plain.optimizer.state_dict()["param_groups"]
    ), read


def assert_trained_alike(run: Run, plain: Plain) -> None:
    """The rates that were used are in the weights."""
    for got, want in zip(run.exact(), plain.exact(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Sequence:
    """The same random things done to a run and to plain torch."""

    def __init__(
        self, run: Any, plain: Plain, seed: int, stepping: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.random, self.both, self.stepping = random.Random(seed), (run, plain), stepping
        self.saved: list[dict[str, Any]] = []
        self.skipped_steps = 0
        """Bad steps in a row."""
        self.keep()

    def keep(self) -> None:
        """Groups as somebody holds them who does not read `param_groups` again."""
        self.kept = [one.optimizer.param_groups for one in self.both]

    def order(self) -> list[str]:
        return ["model", *self.random.sample(["optimizer", "scheduler"], 2)]

    def step(self, *, bad: bool) -> None:
        run, plain = self.both
        self.skipped_steps = self.skipped_steps + 1 if bad else 0
        with self.stepping():
            run.step(bad=bad)
        plain.step(bad=bad)

    def good(self) -> None:
        self.step(bad=False)

    def bad(self) -> None:
        # More in a row than two would be a case of their own.
        self.step(bad=self.skipped_steps < 2)

    def read(self) -> None:
        assert_read_alike(*self.both, self.random.choice(list(READS)))

    def set(self) -> None:
        place, rate = self.random.randrange(2), self.random.uniform(0.01, 0.5)
        for one in self.both:
            one.optimizer.param_groups[place]["lr"] = rate

    def multiply(self) -> None:
        factor = self.random.uniform(0.5, 1.2)
        for one in self.both:
            for group in one.optimizer.param_groups:
                group["lr"] *= factor

    def set_kept(self) -> None:
        place, rate = self.random.randrange(2), self.random.uniform(0.01, 0.5)
        for groups in self.kept:
            groups[place]["lr"] = rate
        # A step would read the device to learn when this was done.
        self.read()

    def save(self) -> None:
        order = self.order()
        self.saved = [
            {name: copy.deepcopy(getattr(one, name).state_dict()) for name in order}
            for one in self.both
        ]

    def load(self) -> None:
        order = self.order()
        for one, states in zip(self.both, self.saved, strict=False):
            for name in order:
                getattr(one, name).load_state_dict(copy.deepcopy(states[name]))
        self.keep()

    def again(self) -> None:
        run, plain = self.both
        self.both = run.again(), plain.again()
        self.keep()


ACTIONS = (
    ["good"] * 8
    + ["bad"] * 3
    + ["read"] * 3
    + ["set", "multiply", "set_kept", "save", "load", "again"]
)


def drive(
    run: Any,
    plain: Plain,
    seed: int,
    actions: int,
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Do the same random things to a run and to plain torch, and compare whenever something is read. Steps are taken within `stepping()`."""
    sequence = Sequence(run, plain, seed, stepping)
    for _ in range(actions):
        getattr(sequence, sequence.random.choice(ACTIONS))()
    for read in READS:
        assert_read_alike(*sequence.both, read)
    assert_trained_alike(*sequence.both)
