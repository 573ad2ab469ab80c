"""Models, optimizers, scaler and schedulers of a step, prepared for the policy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import Region
from mezzo.optim.bind_optimizer import bind_optimizer, has_device_step
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.master_weights import MasterWeights
from mezzo.parallel.ddp import DDPWrappers, find_ddp_wrappers, inner_models
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Master
from mezzo.prepare.arguments import Models, Optimizer, Optimizers, flat, optimizers_of
from mezzo.prepare.decorate import decorate, undecorate
from mezzo.prepare.decoration import (
    Decoration,
    all_decorated,
    decoration_of,
    inner_optimizer,
)
from mezzo.prepare.keep_full import read_keep_full
from mezzo.prepare.plan import PolicyArg, input_dtype_of
from mezzo.scaling.scaler import DisabledGradScaler, GradScaler
from mezzo.scaling.schedule_lookahead import check_scheduler

ScalerArg = GradScaler | bool | None
"""A scaler, False for none, None for one if the dtype is float16."""
SchedulersArg = LRScheduler | list[LRScheduler] | tuple[LRScheduler, ...] | None


@dataclass(frozen=True, eq=False)
class StepComponents:
    """Models and optimizers that were decorated together, with everything that steps them."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    scaler: GradScaler | None
    schedulers: Mapping[Optimizer, LRScheduler]
    policy: Policy
    region: Region
    """Autocast region of the body of a step, the loss included."""
    backward_region: Region
    """The same with autocast off: backward ops use the dtypes of their forward ops."""
    device: torch.device
    """Device of the parameters."""
    input_dtype: torch.dtype | None
    """Dtype that the models cast floating-point inputs to first; None if they do not."""
    decoration: Decoration
    ddp: DDPWrappers
    """DistributedDataParallel wrappers of the models; false if there are none."""


@dataclass(frozen=True)
class PrecisionArgs:
    """The arguments of a step that concern precision."""

    policy: PolicyArg | None
    clip_norm: float | None
    overrides: Mapping[str, Any]
    grad_norm: bool = False
    """Whether to compute the norm of the gradients also without `clip_norm`."""
    reduce_dtype: str | torch.dtype | None = None
    """Dtype in which DistributedDataParallel averages gradients; None keeps the dtype of each."""

    @property
    def policy_or_default(self) -> PolicyArg:
        """The policy, O1 if none was passed."""
        return "O1" if self.policy is None else self.policy


def prepare_components(
    model: Models,
    optimizer: Optimizers,
    precision: PrecisionArgs,
    scaler: ScalerArg,
    scheduler: SchedulersArg,
) -> StepComponents:
    """Prepare everything that a step needs.

    Plain models and optimizers are decorated; decorated ones keep their policy.
    """
    ddp = find_ddp_wrappers(model, precision.reduce_dtype)
    models, optimizers = inner_models(model), _inner_optimizers(optimizer)
    if not optimizers:
        raise PolicyError(
            "A training step needs an optimizer. Pass one, or use mezzo.EvalStep for inference."
        )
    # Checked before anything changes: an error must leave models and optimizers as they are.
    _refuse_closures(optimizers)
    schedulers = _check_schedulers(scheduler, optimizers)
    decoration = _decorate_or_check(models, optimizer, optimizers, precision)
    plan, device = decoration.plan, next(iter(models[0].parameters())).device
    if device.type == "cuda":
        _bind_device_steps(optimizers)
    if precision.grad_norm:
        _track_norms(optimizers, decoration)
    shared = decoration.scaler if scaler is None else scaler
    step_scaler = choose_scaler(shared, plan.dtype, plan.policy.level, device)
    if step_scaler is not None:
        for inner_model in models:
            step_scaler.register_parameter_names(inner_model)
    ddp.check(models, optimizers, scales_loss=step_scaler is not None)
    region = region_for(plan.policy, device.type)
    return StepComponents(
        models=models,
        optimizers=optimizers,
        scaler=step_scaler,
        schedulers=schedulers,
        policy=plan.policy,
        region=region,
        backward_region=region.disabled(),
        device=device,
        input_dtype=input_dtype_of(plan),
        decoration=decoration,
        ddp=ddp,
    )


@contextmanager
def restored_on_error(model: Models, optimizer: Optimizers) -> Iterator[None]:
    """Undo decoration, binding and memory format of plain models and optimizers on an error."""
    models, optimizers = inner_models(model), _inner_optimizers(optimizer)
    plain = all(decoration_of(inner) is None for inner in models)
    unbound = [inner for inner in optimizers if optimizer_binding(inner) is None]
    memory = (
        [
            (tensor, tensor.data)
            for module in models
            for tensor in (*module.parameters(), *module.buffers())
        ]
        if plain
        else []
    )
    try:
        yield
    except BaseException:
        if plain and decoration_of(models[0]) is not None:
            undecorate(models)
        for inner in unbound:
            if (binding := optimizer_binding(inner)) is not None:
                binding.unbind()
        for tensor, data in memory:
            tensor.data = data
        raise


def _inner_optimizers(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Return optimizers without the wrappers of Accelerate and Lightning around decorated ones."""
    return tuple(map(inner_optimizer, optimizers_of(optimizer)))


def _decorate_or_check(
    models: tuple[nn.Module, ...],
    passed: Optimizers,
    optimizers: tuple[Optimizer, ...],
    precision: PrecisionArgs,
) -> Decoration:
    """Decorate plain models; check that decorated ones fit the arguments of the step.

    `passed` has the wrappers of Accelerate and Lightning that `optimizers` are taken from.
    """
    decoration = decoration_of(models[0])
    if decoration is not None:
        _check_decoration(decoration, models, optimizers, precision)
        return decoration
    decorate(
        models,
        passed,
        precision.policy_or_default,
        clip_norm=precision.clip_norm,
        **precision.overrides,
    )
    return _decoration(models[0])


def _decoration(model: nn.Module) -> Decoration:
    decoration = decoration_of(model)
    if decoration is None:
        raise PolicyError("The model is not decorated.")
    return decoration


def _check_decoration(
    decoration: Decoration,
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    precision: PrecisionArgs,
) -> None:
    """Check that all were decorated together, and with the requested policy if there is one."""
    if any(decoration_of(owner) is not decoration for owner in all_decorated(models, optimizers)):
        raise PolicyError(
            "The model is decorated, but not together with the other models and optimizers."
            " Decorate all in one call, or pass them plain: the step decorates them. An EvalStep"
            " decorates a plain model too: create it after the step that trains the model."
        )
    if precision.policy is not None or precision.overrides:
        requested = read_keep_full(precision.policy_or_default, dict(precision.overrides), models)[
            0
        ]
        if requested != decoration.plan.policy:
            raise PolicyError(
                f"The model was decorated with {decoration.plan.policy!r}, but the step was given"
                f" {requested!r}. Leave the policy out to use the model's."
            )
    clip_norm = decoration.plan.clip_norm
    if precision.clip_norm is not None and precision.clip_norm != clip_norm:
        raise PolicyError(
            f"The step was given clip_norm={precision.clip_norm!r}, but the optimizer was decorated"
            f" with clip_norm={clip_norm!r}. Pass it to decorate(..., clip_norm=...) only; in a"
            " framework, to mezzo's plugin or use(...), which decorate the model."
        )


def _refuse_closures(optimizers: tuple[Optimizer, ...]) -> None:
    """Raise `UnsupportedError` for optimizers whose step needs a closure, as LBFGS does."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
        for argument in arguments:
            if argument.default is inspect.Parameter.empty and argument.kind not in variadic:
                raise UnsupportedError(
                    f"{name}.step() needs its argument {argument.name!r}, and a training step calls"
                    " it without arguments: it computes the gradients of an update once, scaled."
                    " Use another optimizer, or train in float32 without a training step and call"
                    f" {name}.step({argument.name}) yourself."
                )


def _bind_device_steps(optimizers: tuple[Optimizer, ...]) -> None:
    """Give optimizers without master weights, as at O1, a step on the device.

    It skips, counts and reads learning rates on the device, as a captured step must.
    """
    for optimizer in optimizers:
        if optimizer_binding(optimizer) is None and has_device_step(optimizer):
            bind_optimizer(optimizer, MasterWeights(Master.NONE))


def _track_norms(optimizers: tuple[Optimizer, ...], decoration: Decoration) -> None:
    """Let the steps of optimizers compute the norm of their gradients."""
    for optimizer in optimizers:
        binding = optimizer_binding(optimizer)
        if binding is None:
            binding = bind_optimizer(optimizer, MasterWeights(Master.NONE))
            decoration.undo_stack.callback(binding.unbind)
        binding.track_norm()


def choose_scaler(
    scaler: ScalerArg, dtype: torch.dtype | None, level: Level, device: torch.device
) -> GradScaler | None:
    """Return the scaler for a `scaler=` argument; None if the loss is not scaled."""
    if scaler is False or isinstance(scaler, DisabledGradScaler):
        return None
    if scaler is None or scaler is True:
        if dtype is not torch.float16:
            return None
        if level is Level.O3:
            # A fixed scale of 1: gradients are checked, and non-finite steps are skipped.
            return GradScaler(device.type, init_scale=1.0, dynamic=False)
        return GradScaler(device.type)
    if not isinstance(scaler, GradScaler):
        raise PolicyError(
            f"scaler={scaler!r} is not a mezzo.GradScaler. Pass one, False for none, or None to"
            " create one if the dtype is float16."
        )
    return scaler


def _check_schedulers(
    argument: SchedulersArg, optimizers: tuple[Optimizer, ...]
) -> dict[Optimizer, LRScheduler]:
    """Check that schedulers can run ahead; return them by optimizer."""
    schedulers: dict[Optimizer, LRScheduler] = {}
    for scheduler in () if argument is None else flat(argument):
        owner = getattr(scheduler, "optimizer", None)
        if isinstance(scheduler, LRScheduler) and owner not in optimizers:
            raise PolicyError(
                f"{type(scheduler).__name__} belongs to another optimizer than the step's. Create"
                " it with the optimizer that is passed to the step."
            )
        # Also without a scaler, so that every dtype accepts the same schedulers.
        check_scheduler(optimizers[0] if owner is None else owner, scheduler)
        if scheduler.optimizer in schedulers:
            other = schedulers[scheduler.optimizer]
            raise PolicyError(
                f"Got {type(other).__name__} and {type(scheduler).__name__} for the same optimizer."
                " Pass one scheduler for each: torch's ChainedScheduler steps several together,"
                " SequentialLR one after the other."
            )
        schedulers[scheduler.optimizer] = scheduler
    return schedulers
