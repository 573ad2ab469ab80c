"""Learning rate schedulers, and runs whose rates are compared with those of plain torch."""

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
"""All ways to compute a rate: from the epoch, from the last rate, by a cycle, or from other
schedulers."""


class Run:
    """An optimizer of two groups with its scheduler; all gradients are one."""

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
        """Return a new run that continues from this one's state, as after a restart."""
        raise NotImplementedError

    def exact(self) -> list[torch.Tensor]:
        return [parameter.detach().float().cpu() for parameter in self.model.parameters()]


class Plain(Run):
    """Plain torch in float32, which skips steps with `bad=True`."""

    def step(self, *, bad: bool) -> None:
        if not bad:
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.scheduler.step()

    def again(self) -> Plain:
        restarted = type(self)(self.make, self.device)
        for name in ("model", "optimizer", "scheduler"):
            getattr(restarted, name).load_state_dict(
                copy.deepcopy(getattr(self, name).state_dict())
            )
        return restarted


class OnDevice(torch.optim.Optimizer):
    """SGD that skips on the device and reads its rates there, as torch's fused ones on CUDA."""

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
        restarted = type(self)(self.make, self.device)
        for name in ("model", "optimizer", "scaler", "scheduler"):
            getattr(restarted, name).load_state_dict(
                copy.deepcopy(getattr(self, name).state_dict())
            )
        return restarted


def summed(outputs: torch.Tensor, boost: torch.Tensor) -> torch.Tensor:
    return (outputs * boost).sum()


class Stepped(Run):
    """A float16 `TrainStep` over float32 master weights."""

    def __init__(self, make: Make, device: str = "cpu", **options: Any) -> None:
        super().__init__(make, device)
        self.scaler, self.options = mezzo.GradScaler(init_scale=4.0, dynamic=False), options
        options = {"dtype": "float16", "channels_last": False, "scaler": self.scaler, **options}
        self.train = mezzo.TrainStep(
            self.model, summed, self.optimizer, "O2", scheduler=self.scheduler, **options
        )
        self.ones = torch.ones(1, 3, device=device)
        self.boosts = [torch.tensor(boost, device=device) for boost in (1.0, float("inf"))]

    def step(self, *, bad: bool) -> None:
        self.train(self.ones, self.boosts[bad])

    def again(self) -> Stepped:
        restarted = Stepped(self.make, self.device, **self.options)
        restarted.train.load_state_dict(copy.deepcopy(self.train.state_dict()))
        return restarted

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
    """Return a scheduler's state without its functions."""
    if isinstance(state, dict):
        return {key: known(value) for key, value in state.items() if not callable(value)}
    return (
        [known(value) for value in state if not callable(value)]
        if isinstance(state, list)
        else state
    )


def assert_read_alike(run: Any, plain: Plain, read: str) -> None:
    """Assert that after any first read all values are those of plain torch."""
    READS[read](run)
    # Read directly: the first read must have updated the groups.
    assert numbers(groups_of(run.optimizer)) == numbers(plain.optimizer.param_groups), read
    assert known(run.scheduler.state_dict()) == known(plain.scheduler.state_dict()), read
    assert run.scheduler.get_last_lr() == plain.scheduler.get_last_lr(), read
    assert numbers(run.optimizer.state_dict()["param_groups"]) == numbers(
        plain.optimizer.state_dict()["param_groups"]
    ), read


def assert_trained_alike(run: Run, plain: Plain) -> None:
    """Assert that the weights are equal, which depend on all rates that were used."""
    for got, want in zip(run.exact(), plain.exact(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Sequence:
    """The same random actions on a run and on plain torch."""

    def __init__(
        self, run: Any, plain: Plain, seed: int, stepping: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.random, self.both, self.stepping = random.Random(seed), (run, plain), stepping
        self.saved: list[dict[str, Any]] = []
        self.skipped_steps = 0
        """Number of skipped steps in a row."""
        self.keep()

    def keep(self) -> None:
        """Keep references to the groups, as code that reads `param_groups` only once."""
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
        # At most two in a row: longer sequences are tested elsewhere.
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
        # Otherwise the next step synchronizes to find out when the rate was set.
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
    """Apply the same random actions to a run and to plain torch, and compare at each read.

    Steps are taken inside `stepping()`.
    """
    sequence = Sequence(run, plain, seed, stepping)
    for _ in range(actions):
        getattr(sequence, sequence.random.choice(ACTIONS))()
    for read in READS:
        assert_read_alike(*sequence.both, read)
    assert_trained_alike(*sequence.both)
