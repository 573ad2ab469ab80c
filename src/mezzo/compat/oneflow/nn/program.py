"""What a graph becomes at its first call: a training step, or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._casting import cast_all
from mezzo._errors import PolicyError
from mezzo.autocasting.autocast import everywhere
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level
from mezzo.prepare.decorate import undecorate
from mezzo.scaling.scaler import GradScaler
from mezzo.step.evaluate import EvalStep
from mezzo.step.free import train_step

Build = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A graph without an optimizer."""

    build: Build
    policy: Policy

    def made(self, whole: Whole) -> Program:
        """The graph as an evaluation; as it is where it has no parameters."""
        if next(whole.parameters(), None) is None:
            return Program(_unparametrized(whole, self.policy))
        return Program(EvalStep(whole, self.policy))


@dataclass(frozen=True, eq=False)
class Training:
    """A graph with optimizers."""

    build: Build
    policy: Policy
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    scaler: GradScaler | None

    def made(self, whole: Whole) -> Program:
        """The graph as a training step. Nothing stays on the modules and optimizers: they may be in other graphs, and be called by themselves."""
        if next(whole.parameters(), None) is None:
            raise PolicyError("The graph has an optimizer and no module with parameters. Set the modules as attributes of the graph in __init__.")
        make = train_step(
            models=whole,
            optimizers=self.optimizers,
            policy=self.policy,
            scaler=False if self.scaler is None else self.scaler,
            scheduler=self.schedulers or None,
        )
        try:
            return Program(make(whole.forward))
        finally:
            undecorate(whole)


class Program:
    """A graph that is ready."""

    def __init__(self, run: Runs) -> None:
        self.run = run


class Runs(Protocol):
    """Whatever runs a graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the graph."""


class Whole(nn.Module):
    """A graph's modules as one, with `build` as forward."""

    def __init__(self, build: Build, policy: Policy, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._build, self._casts = build, policy.level is not Level.O0
        for name, block in blocks.items():
            self.add_module(name, block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `build` computes, in float32: the outputs of OneFlow's graphs are in none of its lists."""
        built = self._build(*args, **kwargs)
        return _widened(built) if self._casts else built


def program_of(parts: Training | Evaluation, blocks: Mapping[str, nn.Module]) -> Program:
    """Make a graph ready."""
    return parts.made(Whole(parts.build, parts.policy, blocks))


def _widened(value: Any) -> Any:
    for device in ("cpu", "cuda"):
        value = cast_all(value, torch.float32, device)
    return value


def _unparametrized(whole: Whole, policy: Policy) -> Runs:
    region = everywhere(policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        with region, torch.inference_mode():
            return whole(*args, **kwargs)

    return run
