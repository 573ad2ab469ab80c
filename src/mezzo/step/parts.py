"""What a step is made of: models and optimizers ready for a policy, and the scaler that goes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import PolicyError
from mezzo.autocasting.arguments import region_of
from mezzo.autocasting.regions import Region
from mezzo.optim.algorithms import ALGORITHMS, kind_of
from mezzo.optim.bind import bind
from mezzo.optim.bound import bound_of
from mezzo.optim.masters import Masters
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Master
from mezzo.prepare import keep
from mezzo.prepare.decorate import decorate, undecorate
from mezzo.prepare.decoration import Decoration, both, decoration_of
from mezzo.prepare.given import Models, Optimizer, Optimizers, flat, models_of, optimizers_of
from mezzo.prepare.plan import PolicyWords
from mezzo.scaling.lookahead import check
from mezzo.scaling.scaler import DisabledGradScaler, GradScaler

Scaler = GradScaler | bool | None
"""A scaler, False for none, None for what the dtype needs."""
Schedulers = LRScheduler | list[LRScheduler] | tuple[LRScheduler, ...] | None


@dataclass(frozen=True, eq=False)
class Parts:
    """Models and optimizers that were decorated together, with all that steps them."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    scaler: GradScaler | None
    schedulers: Mapping[Optimizer, LRScheduler]
    policy: Policy
    region: Region
    """What the body of a step runs in, the loss included."""
    device: torch.device
    """Where the parameters live."""
    enters: torch.dtype | None
    """What the models cast their floating-point inputs to before anything else; None where they leave them."""
    decoration: Decoration
    """What the models and optimizers were decorated with."""


@dataclass(frozen=True)
class Asked:
    """What a user said about precision."""

    policy: PolicyWords | None
    clip_norm: float | None
    overrides: Mapping[str, Any]

    def prepare(self, model: Models, optimizer: Optimizers) -> None:
        """Decorate a plain pair."""
        decorate(model, optimizer, "O1" if self.policy is None else self.policy, clip_norm=self.clip_norm, **self.overrides)


def gather(model: Models, optimizer: Optimizers, asked: Asked, scaler: Scaler, scheduler: Schedulers) -> Parts:
    """Make everything ready for a step. A plain pair is decorated as the policy says; a decorated one brings its own."""
    models, optimizers = models_of(model), optimizers_of(optimizer)
    if not optimizers:
        raise PolicyError("A training step needs an optimizer. Pass one, or use mezzo.EvalStep for inference.")
    # First, for a scheduler that is refused must leave model and optimizer as they were.
    schedulers = _schedulers(scheduler, optimizers)
    found = decoration_of(models[0])
    if found is None:
        asked.prepare(model, optimizer)
    else:
        _agree(found, models, optimizers, asked)
    decoration = _decorated(models[0])
    plan, device = decoration.plan, next(models[0].parameters()).device
    if device.type == "cuda":
        _let_skip_by_themselves(optimizers)
    made = _scaler(scaler, plan.dtype, plan.policy.level, device)
    if made is not None:
        for one in models:
            made.watch(one)
    return Parts(
        models,
        optimizers,
        made,
        schedulers,
        plan.policy,
        region_of(plan.policy, device.type),
        device,
        plan.dtype if plan.converts else None,
        decoration,
    )


@contextmanager
def restored_on_error(model: Models, optimizer: Optimizers) -> Iterator[None]:
    """Put a plain pair back as it was, layout included, if a step cannot be made of it."""
    models, optimizers = models_of(model), optimizers_of(optimizer)
    plain = all(decoration_of(one) is None for one in models)
    unbound = [one for one in optimizers if bound_of(one) is None]
    memory = [(tensor, tensor.data) for one in models for tensor in (*one.parameters(), *one.buffers())] if plain else []
    try:
        yield
    except BaseException:
        if plain and decoration_of(models[0]) is not None:
            undecorate(model)
        for one in unbound:
            if (bound := bound_of(one)) is not None:
                bound.unbind()
        for tensor, data in memory:
            tensor.data = data
        raise


def _decorated(model: nn.Module) -> Decoration:
    found = decoration_of(model)
    if found is None:
        raise PolicyError("The model is not decorated.")
    return found


def _agree(found: Decoration, models: tuple[nn.Module, ...], optimizers: tuple[Optimizer, ...], asked: Asked) -> None:
    """Refuse a decorated pair that is not the pair, or that a policy was given for that is not its own."""
    if any(decoration_of(one) is not found for one in both(models, optimizers)):
        raise PolicyError("The model is decorated, but not together with the rest. Decorate everything in one call, or pass it plain: the step decorates it.")
    if asked.policy is not None or asked.overrides:
        read = keep.read("O1" if asked.policy is None else asked.policy, dict(asked.overrides), models)[0]
        if read != found.plan.policy:
            raise PolicyError(
                f"The model was decorated with {found.plan.policy!r}, and the step was given {read!r}. Leave the policy out: the model brings its own."
            )
    if asked.clip_norm is not None and asked.clip_norm != found.plan.clip_norm:
        raise PolicyError(
            f"clip_norm={asked.clip_norm!r}, but the optimizer was decorated with clip_norm={found.plan.clip_norm!r}. Say it once: decorate(..., clip_norm=...)."
        )


def _let_skip_by_themselves(optimizers: tuple[Optimizer, ...]) -> None:
    """At O1 an optimizer is as it was: the fused step lets it skip, count and read its rates on the device, as a captured step must."""
    for optimizer in optimizers:
        if bound_of(optimizer) is None and kind_of(optimizer) in ALGORITHMS:
            bind(optimizer, Masters(Master.NONE))


def _scaler(scaler: Scaler, dtype: torch.dtype | None, level: Level, device: torch.device) -> GradScaler | None:
    if scaler is False or isinstance(scaler, DisabledGradScaler):
        return None
    if scaler is None or scaler is True:
        if dtype is not torch.float16:
            return None
        # At O3 the scale is 1 for ever: gradients are checked, and a bad step is skipped.
        return GradScaler(device.type) if level is not Level.O3 else GradScaler(device.type, init_scale=1.0, dynamic=False)
    if not isinstance(scaler, GradScaler):
        raise PolicyError(f"scaler={scaler!r} is not a mezzo.GradScaler. Pass one, False for none, or None for what the dtype needs.")
    return scaler


def _schedulers(given: Schedulers, optimizers: tuple[Optimizer, ...]) -> dict[Optimizer, LRScheduler]:
    found: dict[Optimizer, LRScheduler] = {}
    for one in () if given is None else flat(given):
        owner = getattr(one, "optimizer", None)
        if isinstance(one, LRScheduler) and owner not in optimizers:
            raise PolicyError(f"{type(one).__name__} belongs to another optimizer than the step's. Make it with the optimizer that the step was given.")
        # Alike with a scaler and without: what is accepted does not depend on the dtype.
        check(optimizers[0] if owner is None else owner, one)
        if one.optimizer in found:
            raise PolicyError(
                f"Got {type(found[one.optimizer]).__name__} and {type(one).__name__} for the same optimizer. Pass one scheduler for each: "
                "torch's ChainedScheduler steps several together, SequentialLR one after the other."
            )
        found[one.optimizer] = one
    return found
