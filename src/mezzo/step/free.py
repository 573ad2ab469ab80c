"""`mezzo.train_step`: a step whose body is the user's own function, over several models, losses and optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from mezzo._errors import PolicyError
from mezzo.prepare.given import Models, Optimizers
from mezzo.prepare.plan import PolicyWords
from mezzo.step.base import Step
from mezzo.step.engine import Rules
from mezzo.step.parts import Asked, Parts, Scaler, Schedulers, gather, restored_on_error
from mezzo.step.seen import values_seen
from mezzo.step.train import count_of
from mezzo.step.words import Capture, Reduction

HANDLE = "update"
"""A body whose first parameter has this name is handed what updates single optimizers."""


class FreeStep(Step):
    """A training step whose body is a function; called like the function."""

    def __init__(self, body: Callable[..., Any], parts: Parts, rules: Rules, capture: Capture) -> None:
        super().__init__(parts, body, rules, capture)
        self._engine.seen = values_seen(body)
        update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, and give copies of what the body returns."""
        return self._call(args, kwargs)


def train_step(
    *,
    models: Models,
    optimizers: Optimizers,
    policy: PolicyWords | None = None,
    scaler: Scaler = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    accumulate_reduction: str | Reduction = Reduction.MEAN,
    scheduler: Schedulers = None,
    capture: str | bool | Capture = Capture.AUTO,
    **overrides: Any,
) -> Callable[[Callable[..., Any]], FreeStep]:
    """Make a training step of a function that computes a loss.

    The function returns the loss, and gradients, update and scaling follow; or it calls `loss.backward()` itself, as often as it likes, and returns what it
    likes. Every optimizer that got gradients is then stepped.

    >>> import mezzo, torch
    >>> from torch import nn
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> @mezzo.train_step(models=model, optimizers=optimizer, policy="O1", dtype="bfloat16")
    ... def step(x):
    ...     return model(x).square().mean()
    >>> bool(step(torch.ones(8, 4)) > step(torch.ones(8, 4)))
    True

    Where an optimizer is to step in the middle of the body, as those of a GAN, the function takes `update` first: `update(loss, optimizer)` computes gradients
    for the parameters of this optimizer alone, and steps it.

        @mezzo.train_step(models=[generator, critic], optimizers=[of_generator, of_critic])
        def step(update, real, noise):
            fake = generator(noise)
            loss_critic = critic_loss(critic(real), critic(fake.detach()))
            update(loss_critic, of_critic)
            loss = generator_loss(critic(fake))
            update(loss, of_generator)
            return loss, loss_critic
    """
    rules = (count_of(accumulate), Reduction.parse(accumulate_reduction))
    chosen = Capture.parse(capture)  # type: ignore[arg-type]

    def make(body: Callable[..., Any]) -> FreeStep:
        handed = _takes_update(body)
        if handed and accumulate > 1:
            raise PolicyError(f"A body that takes {HANDLE!r} steps there and then, and accumulate={accumulate} would not. Return the loss instead.")
        with restored_on_error(models, optimizers):
            parts = gather(models, optimizers, Asked(policy, clip_norm, overrides), scaler, scheduler)
            return FreeStep(body, parts, Rules(*rules, free=True, handed=handed), chosen)

    return make


def _takes_update(body: Any) -> bool:
    if not callable(body):
        raise PolicyError(f"train_step(...) makes a step of a function, got {body!r}. Write @mezzo.train_step(models=..., optimizers=...) above it.")
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise PolicyError(f"{body.__name__} is a generator or a coroutine, which runs on after it was called. Pass a plain function.")
    names = list(inspect.signature(body).parameters)
    return bool(names) and names[0] == HANDLE
