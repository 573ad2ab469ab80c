"""Make the replay of a batch, from a training step or from a model with its loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.observing.replay import Body, Replay
from mezzo.policy.policy import Policy
from mezzo.prepare.arguments import models_of, unwrapped
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg
from mezzo.prepare.sharding import is_sharded_model
from mezzo.step.base import Step
from mezzo.step.inputs import Call, ModelArguments, call_model, move_inputs
from mezzo.step.outputs import loss_of_output
from mezzo.step.train_step import TrainStep

_INPUTS_AND_TARGET = (1, 2)
"""Values of a batch for a model and a loss function."""


def replay_of(
    target: Any,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    policy: PolicyArg | None = None,
    scaler: Any = None,
    **overrides: Any,
) -> Replay:
    """Return the replay of a batch of a step, or of a model with a loss function."""
    if isinstance(target, Step):
        if loss_fn is not None:
            raise PolicyError("A training step has its loss function. Leave loss_fn out.")
        replay = _step_replay(target, batch)
    elif isinstance(target, nn.Module):
        replay = _model_replay(target, batch, loss_fn)
    else:
        raise PolicyError(
            f"Got {type(target).__name__}. Pass a mezzo.TrainStep, a @mezzo.train_step function or"
            " a torch.nn.Module."
        )
    if is_sharded_model(replay.models):
        raise UnsupportedError(
            "The model is sharded by FSDP2 or tensor parallelism: a batch would have to be replayed"
            " by all ranks. Pass the model before fully_shard, with the same batch."
        )
    if policy is not None or overrides:
        start = replay.policy if policy is None else policy
        replay = replace(replay, policy=Policy.parse(start, **overrides))
    return replay if scaler is None else replace(replay, scale=_scale(scaler))


def _step_replay(step: Step, batch: Any) -> Replay:
    components, executor = step._components, step._executor
    args, kwargs = _arguments(batch)
    if isinstance(step, TrainStep):
        call = step._arrange(args, kwargs)
    else:
        call = _keywords(step._body, batch) or Call(args, kwargs)
    options, scaler = executor.options, components.scaler
    searches = scaler is not None and executor.finds_scale
    return Replay(
        components.models,
        step._body,
        executor.move_inputs(call),
        components.policy,
        None if searches else _scale(scaler or False),
        step._updates * options.accumulate + step.position,
        options.takes_update,
        components.ddp.wrappers,
        components.decoration.plan.output_dtype,
        _loss_module(getattr(step, "loss_fn", None), components.models),
    )


def _model_replay(target: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> Replay:
    (outer,) = models_of(target)
    (model,) = models_of(unwrapped(outer))
    values = _inputs_and_target(ModelArguments(model), batch, has_loss=loss_fn is not None)

    def body(inputs: Any, *target: Any) -> Any:
        outputs = call_model(model, inputs)
        if loss_fn is None:
            return _loss_or_output(outputs)
        y = target[0] if target and isinstance(target[0], tuple) else target
        return loss_fn(outputs, *y)

    decoration = decoration_of(model)
    plan = None if decoration is None else decoration.plan
    replay = Replay(
        (model,),
        body,
        Call(values, {}),
        Policy("O1") if plan is None else plan.policy,
        None,
        wrappers=(outer,) if isinstance(outer, DistributedDataParallel) else (),
        output_dtype=None if plan is None else plan.output_dtype,
        loss_module=_loss_module(loss_fn, (model,)),
    )
    return replace(replay, call=move_inputs(replay.call, replay.device))


def _loss_module(loss_fn: Any, models: Sequence[nn.Module]) -> nn.Module | None:
    """Return a loss function that is a module, unless it has modules of the models inside it."""
    if not isinstance(loss_fn, nn.Module):
        return None
    of_models = {id(module) for model in models for module in model.modules()}
    return None if any(id(module) in of_models for module in loss_fn.modules()) else loss_fn


def _inputs_and_target(arguments: ModelArguments, batch: Any, *, has_loss: bool) -> tuple[Any, ...]:
    """Return the inputs as one value for `call_model`, and the target if there is one."""
    args, kwargs = _arguments(batch)
    if not has_loss:
        return (arguments.arrange(args, kwargs),)
    if len(args) not in _INPUTS_AND_TARGET:
        raise PolicyError(
            f"With loss_fn the batch is (inputs, target), got {len(args)} values. Pass several"
            " inputs as a tuple: ((a, b), target)."
        )
    return arguments.arrange(args[:1], {}), *args[1:]


def _loss_or_output(outputs: Any) -> Any:
    """Return the loss of a model; what it returned if there is none, so that only forward runs."""
    try:
        return loss_of_output(outputs)
    except PolicyError:
        return outputs


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    return (batch,), {}


def _keywords(body: Body, batch: Any) -> Call | None:
    """Return a call with keywords if the batch is a mapping whose names the function has."""
    names = inspect.signature(body).parameters
    if isinstance(batch, Mapping) and batch and all(name in names for name in batch):
        return Call((), dict(batch))
    return None


def _scale(scaler: Any) -> float:
    """Return the loss scale of a scaler of mezzo or torch, or a number; 1 without one."""
    if scaler is False:
        return 1.0
    return float(scaler.get_scale() if hasattr(scaler, "get_scale") else scaler)
