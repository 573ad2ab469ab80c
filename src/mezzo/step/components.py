"""Models, optimizers, scaler and schedulers of a step, prepared for the policy; its state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import CheckpointError, PolicyError
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import Region
from mezzo.optim.attach import bind_optimizer
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Master, ParsedEnum
from mezzo.prepare import arguments, checkpoint_checks, rng_state
from mezzo.prepare.arguments import Models, Optimizer, Optimizers, flat, models_of, optimizers_of
from mezzo.prepare.checkpoint import optimizer_state
from mezzo.prepare.decorate import decorate, undecorate
from mezzo.prepare.decoration import Decoration, all_decorated, decoration_of
from mezzo.prepare.model_state_dict import exact_state_dict
from mezzo.prepare.plan import PolicyArg
from mezzo.prepare.rollback import rolled_back_on_error
from mezzo.scaling.gradients import parameters
from mezzo.scaling.scaler import DisabledGradScaler, GradScaler
from mezzo.scaling.schedule_lookahead import check
from mezzo.step.module_buffers import ModuleBuffers

Scaler = GradScaler | bool | None
"""A scaler, False for none, None for what the dtype needs."""
Schedulers = LRScheduler | list[LRScheduler] | tuple[LRScheduler, ...] | None


@dataclass(frozen=True, eq=False)
class StepComponents:
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
    input_dtype: torch.dtype | None
    """What the models cast their floating-point inputs to before anything else; None where they
    leave them."""
    decoration: Decoration
    """What the models and optimizers were decorated with."""


@dataclass(frozen=True)
class PrecisionArgs:
    """What a user said about precision."""

    policy: PolicyArg | None
    clip_norm: float | None
    overrides: Mapping[str, Any]

    def prepare(self, model: Models, optimizer: Optimizers) -> None:
        """Decorate a plain pair."""
        decorate(
            model,
            optimizer,
            "O1" if self.policy is None else self.policy,
            clip_norm=self.clip_norm,
            **self.overrides,
        )


def prepare_components(
    model: Models,
    optimizer: Optimizers,
    asked: PrecisionArgs,
    scaler: Scaler,
    scheduler: Schedulers,
) -> StepComponents:
    """Make everything ready for a step. A plain pair is decorated as the policy says; a decorated one brings its own."""
    models, optimizers = models_of(model), optimizers_of(optimizer)
    if not optimizers:
        raise PolicyError(
            "A training step needs an optimizer. Pass one, or use mezzo.EvalStep for inference."
        )
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
            made.register_parameter_names(one)
    return StepComponents(
        models,
        optimizers,
        made,
        schedulers,
        plan.policy,
        region_for(plan.policy, device.type),
        device,
        plan.dtype if plan.converts else None,
        decoration,
    )


@contextmanager
def restored_on_error(model: Models, optimizer: Optimizers) -> Iterator[None]:
    """Put a plain pair back as it was, layout included, if a step cannot be made of it."""
    models, optimizers = models_of(model), optimizers_of(optimizer)
    plain = all(decoration_of(one) is None for one in models)
    unbound = [one for one in optimizers if optimizer_binding(one) is None]
    memory = (
        [(tensor, tensor.data) for one in models for tensor in (*one.parameters(), *one.buffers())]
        if plain
        else []
    )
    try:
        yield
    except BaseException:
        if plain and decoration_of(models[0]) is not None:
            undecorate(model)
        for one in unbound:
            if (bound := optimizer_binding(one)) is not None:
                bound.unbind()
        for tensor, data in memory:
            tensor.data = data
        raise


def _decorated(model: nn.Module) -> Decoration:
    found = decoration_of(model)
    if found is None:
        raise PolicyError("The model is not decorated.")
    return found


def _agree(
    found: Decoration,
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    asked: PrecisionArgs,
) -> None:
    """Refuse a decorated pair that is not the pair, or that a policy was given for that is not its own."""
    if any(decoration_of(one) is not found for one in all_decorated(models, optimizers)):
        raise PolicyError(
            "The model is decorated, but not together with the rest. Decorate everything in one"
            " call, or pass it plain: the step decorates it."
        )
    if asked.policy is not None or asked.overrides:
        read = arguments.read_keep_full(
            "O1" if asked.policy is None else asked.policy, dict(asked.overrides), models
        )[0]
        if read != found.plan.policy:
            raise PolicyError(
                f"The model was decorated with {found.plan.policy!r}, and the step was given"
                f" {read!r}. Leave the policy out: the model brings its own."
            )
    if asked.clip_norm is not None and asked.clip_norm != found.plan.clip_norm:
        raise PolicyError(
            f"clip_norm={asked.clip_norm!r}, but the optimizer was decorated with"
            f" clip_norm={found.plan.clip_norm!r}. Say it once: decorate(..., clip_norm=...)."
        )


def _let_skip_by_themselves(optimizers: tuple[Optimizer, ...]) -> None:
    """At O1 an optimizer is as it was: the fused step lets it skip, count and read its rates on the device, as a captured step must."""
    for optimizer in optimizers:
        if optimizer_binding(optimizer) is None and algorithm_name(optimizer) in ALGORITHMS:
            bind_optimizer(optimizer, MasterWeights(Master.NONE))


def _scaler(
    scaler: Scaler, dtype: torch.dtype | None, level: Level, device: torch.device
) -> GradScaler | None:
    if scaler is False or isinstance(scaler, DisabledGradScaler):
        return None
    if scaler is None or scaler is True:
        if dtype is not torch.float16:
            return None
        # At O3 the scale is 1 for ever: gradients are checked, and a bad step is skipped.
        return (
            GradScaler(device.type)
            if level is not Level.O3
            else GradScaler(device.type, init_scale=1.0, dynamic=False)
        )
    if not isinstance(scaler, GradScaler):
        raise PolicyError(
            f"scaler={scaler!r} is not a mezzo.GradScaler. Pass one, False for none, or None for"
            " what the dtype needs."
        )
    return scaler


def _schedulers(
    given: Schedulers, optimizers: tuple[Optimizer, ...]
) -> dict[Optimizer, LRScheduler]:
    found: dict[Optimizer, LRScheduler] = {}
    for one in () if given is None else flat(given):
        owner = getattr(one, "optimizer", None)
        if isinstance(one, LRScheduler) and owner not in optimizers:
            raise PolicyError(
                f"{type(one).__name__} belongs to another optimizer than the step's. Make it with"
                " the optimizer that the step was given."
            )
        # Alike with a scaler and without: what is accepted does not depend on the dtype.
        check(optimizers[0] if owner is None else owner, one)
        if one.optimizer in found:
            raise PolicyError(
                f"Got {type(found[one.optimizer]).__name__} and {type(one).__name__} for the same"
                " optimizer. Pass one scheduler for each: torch's ChainedScheduler steps several"
                " together, SequentialLR one after the other."
            )
        found[one.optimizer] = one
    return found


class Capture(ParsedEnum):
    """Whether a step becomes one program that the device replays."""

    AUTO = "auto"
    """Where it can be; else it runs eagerly, and says why."""
    ON = True
    """It must be: what cannot be captured is an error."""
    OFF = False
    """It runs eagerly."""


class Layout(ParsedEnum):
    """Whether a convolutional model is converted to channels_last."""

    AUTO = "auto"
    """Where that is faster, measured once on the real model."""
    ON = True
    OFF = False

    @classmethod
    def _argument_name(cls) -> str:
        return "channels_last"


class Reduction(ParsedEnum):
    """What becomes of the gradients of several calls."""

    MEAN = "mean"
    """They are averaged."""
    SUM = "sum"
    """They are added up."""

    @classmethod
    def _argument_name(cls) -> str:
        return "accumulate_reduction"


def step_state_dict(
    parts: StepComponents, buffers: ModuleBuffers, *, position: int, updates: int
) -> dict[str, Any]:
    """The state as nested plain values and tensors."""
    return {
        "models": [exact_state_dict(model) for model in parts.models],
        "optimizers": [optimizer_state(optimizer, parts.models) for optimizer in parts.optimizers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers.values()],
        "gradients": _gradients(parts) if position else None,
        "buffers": buffers.saved() if position else None,
        "position": position,
        "updates": updates,
        "rng": rng_state.capture_rng_state(),
    }


def load_step_state(
    parts: StepComponents, buffers: ModuleBuffers, state: dict[str, Any], accumulate: int
) -> tuple[int, int]:
    """Load a state; return the calls since the last update and the updates so far. An error leaves everything as it was."""
    _check(parts, buffers, state, accumulate)
    schedulers, scaler = (
        tuple(parts.schedulers.values()),
        (() if parts.scaler is None else (parts.scaler,)),
    )
    order: list[tuple[tuple[Any, ...], list[Any]]] = [
        (scaler, [state["scaler"]] if scaler else []),
        (parts.models, state["models"]),
        (schedulers, state["schedulers"]),
        (parts.optimizers, state["optimizers"]),
    ]
    name = "state"
    try:
        with rolled_back_on_error(parts.models, parts.optimizers, (*scaler, *schedulers)):
            for one, saved in (
                pair for several, states in order for pair in zip(several, states, strict=True)
            ):
                name = type(one).__name__
                one.load_state_dict(saved)
            name = "gradients and buffers"
            _load_gradients(parts, state["gradients"])
            rng_state.restore_rng_state(state["rng"])
            if state["buffers"] is not None:
                buffers.load(state["buffers"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The saved {name} cannot be loaded: {error!s:.500} Nothing was changed. Pass what"
            " step.state_dict() gave."
        ) from error
    return state["position"], state["updates"]


def _check(
    parts: StepComponents, buffers: ModuleBuffers, state: dict[str, Any], accumulate: int
) -> None:
    expected = {
        "models": len(parts.models),
        "optimizers": len(parts.optimizers),
        "schedulers": len(parts.schedulers),
    }
    wanted = (*expected, "scaler", "gradients", "buffers", "position", "updates", "rng")
    missing = [name for name in wanted if not isinstance(state, dict) or name not in state]
    if missing:
        raise CheckpointError(
            f"This is no state of a step: it lacks {', '.join(missing)}. Pass what"
            " step.state_dict() gave."
        )
    for name, count in expected.items():
        if not isinstance(state[name], list):
            raise CheckpointError(
                f"The state's {name} are {state[name]!r:.80}, not a list. Pass what"
                " step.state_dict() gave."
            )
        if len(state[name]) != count:
            raise CheckpointError(
                f"The state has {len(state[name])} {name}, and this step {count}. Make the step"
                " with the same parts."
            )
    if (state["scaler"] is None) != (parts.scaler is None):
        has, lacks = ("state", "step") if parts.scaler is None else ("step", "state")
        raise CheckpointError(
            f"The {has} has a scaler, and the {lacks} has none. Make the step with the same dtype"
            " and scaler."
        )
    for name in ("position", "updates"):
        if not isinstance(state[name], int) or isinstance(state[name], bool) or state[name] < 0:
            raise CheckpointError(
                f"The state's {name} is {state[name]!r:.80}, not a number of calls. Pass what"
                " step.state_dict() gave."
            )
    if state["position"] >= accumulate:
        raise CheckpointError(
            f"The state was saved after {state['position']} calls without an update, and this step"
            f" has accumulate={accumulate}."
        )
    several = {
        "model": parts.models,
        "optimizer": parts.optimizers,
        "scheduler": tuple(parts.schedulers.values()),
    }
    checkpoint_checks.check_fit(
        {name: list(zip(own, state[f"{name}s"], strict=True)) for name, own in several.items()},
        strict=True,
    )
    rng_state.check_rng_state(state["rng"])
    _refuse_other_gradients(parts, buffers, state)


def _refuse_other_gradients(
    parts: StepComponents, buffers: ModuleBuffers, state: dict[str, Any]
) -> None:
    """Refuse gradients and buffers of an unfinished update that do not belong to these parameters and buffers."""
    own: dict[str, list[Any]] = {
        "gradients": [parameters(optimizer) for optimizer in parts.optimizers],
        "buffers": buffers.tensors,
    }
    for name, tensors in own.items():
        saved = state[name]
        if (saved is not None) != bool(state["position"]):
            raise CheckpointError(
                f"The state has {'' if saved else 'no '}{name}, and position {state['position']}."
                " Pass what step.state_dict() gave."
            )
        for place, tensor, value in () if saved is None else _side_by_side(name, tensors, saved):
            if value is not None:
                checkpoint_checks.refuse_other_tensor(place, value, tensor, "step")


def _side_by_side(
    name: str, own: Sequence[Any], saved: Any
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Each tensor with what was saved for it, in lists of lists; a list of another length is refused."""
    if not isinstance(saved, list) or len(saved) != len(own):
        raise CheckpointError(
            f"The state's {name} are not a list of {len(own)}. Make the step with the same parts."
        )
    for place, (one, value) in enumerate(zip(own, saved, strict=True)):
        if isinstance(one, torch.Tensor):
            yield f"{name}[{place}]", one, value
        else:
            yield from _side_by_side(f"{name}[{place}]", one, value)


def _gradients(parts: StepComponents) -> list[list[torch.Tensor | None]]:
    return [
        [None if one.grad is None else one.grad.clone() for one in parameters(optimizer)]
        for optimizer in parts.optimizers
    ]


def _load_gradients(
    parts: StepComponents, gradients: list[list[torch.Tensor | None]] | None
) -> None:
    for place, optimizer in enumerate(parts.optimizers):
        optimizer.zero_grad(set_to_none=True)
        if gradients is not None:
            for parameter, gradient in zip(parameters(optimizer), gradients[place], strict=True):
                parameter.grad = (
                    None
                    if gradient is None
                    else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                )
