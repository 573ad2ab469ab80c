"""`mezzo.decorate`: a plan applied whole or not at all; `mezzo.undecorate`: everything as it was."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any, TypeVar, overload

from torch import nn

from mezzo._errors import PolicyError
from mezzo.autocasting.arguments import region_of
from mezzo.autocasting.autocast import bind_modules
from mezzo.optim import saved
from mezzo.optim.bind import bind
from mezzo.optim.masters import Masters
from mezzo.policy.types import Level, Master
from mezzo.prepare import align, door, thaw, weight_hooks
from mezzo.prepare.decoration import Decoration, both, decoration_of, flatten_rnns, mark
from mezzo.prepare.given import Models, Optimizer, Optimizers, models_of, optimizers_of
from mezzo.prepare.guard import guard
from mezzo.prepare.plan import Dtype, Job, PolicyWords, study
from mezzo.prepare.weights import Weights

ModelT = TypeVar("ModelT", bound=Models)
OptimizerT = TypeVar("OptimizerT", bound=Optimizers)


@overload
def decorate(
    model: ModelT,
    optimizer: None = None,
    policy: PolicyWords = "O2",
    *,
    clip_norm: float | None = None,
    output_dtype: Dtype = None,
    save_dtype: Dtype = None,
    seed: int = 0,
    yields: bool = False,
    **overrides: Any,
) -> ModelT: ...
@overload
def decorate(
    model: ModelT,
    optimizer: OptimizerT,
    policy: PolicyWords = "O2",
    *,
    clip_norm: float | None = None,
    output_dtype: Dtype = None,
    save_dtype: Dtype = None,
    seed: int = 0,
    yields: bool = False,
    **overrides: Any,
) -> tuple[ModelT, OptimizerT]: ...
def decorate(
    model: Models,
    optimizer: Optimizers | None = None,
    policy: PolicyWords = "O2",
    *,
    clip_norm: float | None = None,
    output_dtype: Dtype = None,
    save_dtype: Dtype = None,
    seed: int = 0,
    yields: bool = False,
    **overrides: Any,
) -> Any:
    """Make a model and its optimizer ready for a policy, whole or not at all: both stay the objects they were, and so do the parameters.

    `mezzo.plan` with the same arguments says what will happen; `mezzo.undecorate` puts everything back. Inside an `autocast` that is on, a model with
    `yields=True` runs as that says, and by its own policy everywhere else.

    A deep copy of a decorated model is a 16-bit model without masters: average weights with `mezzo.EMA`, and read exact ones with `mezzo.master_params`.

    >>> import mezzo, torch
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> model.weight.dtype, mezzo.undecorate(model).weight.dtype
    (torch.bfloat16, torch.float32)
    """
    _refuse_twice(model, optimizer)
    job = study(model, optimizer, policy, clip_norm=clip_norm, output_dtype=output_dtype, save_dtype=save_dtype, seed=seed, yields=yields, **overrides)
    _warn_of_lost_updates(job)
    _apply(job)
    return model if optimizer is None else (model, optimizer)


@overload
def undecorate(model: ModelT, optimizer: None = None) -> ModelT: ...
@overload
def undecorate(model: ModelT, optimizer: OptimizerT) -> tuple[ModelT, OptimizerT]: ...
def undecorate(model: Models, optimizer: Optimizers | None = None) -> Any:
    """Put back what `decorate` changed: float32 parameters with their current exact values, and forward, step and hooks as they were.

    What was decorated together is put back together; the optimizer need not be passed.
    """
    models, optimizers = models_of(model), optimizers_of(optimizer)
    found = {decoration_of(one) for one in both(models, optimizers)}
    decoration = found.pop() if len(found) == 1 else None
    if decoration is None:
        raise PolicyError("These were not decorated, or not together: undecorate(model) takes the model that went through mezzo.decorate, not a copy of it.")
    if len(models) != len(decoration.models):
        raise PolicyError(f"{len(decoration.models)} models were decorated together, got {len(models)}. Pass all of them, as to decorate.")
    decoration.undo()
    return model if optimizer is None else (model, optimizer)


def _refuse_twice(model: Models, optimizer: Optimizers | None) -> None:
    for one in both((part for whole in models_of(model) for part in whole.modules()), optimizers_of(optimizer)):
        if decoration_of(one) is not None:
            raise PolicyError(f"This {type(one).__name__} is decorated already. Call mezzo.undecorate(model, optimizer) first, then decorate anew.")


def _warn_of_lost_updates(job: Job) -> None:
    policy, trained = job.plan.policy, any(one.converted and one.found.tensor.requires_grad for one in job.tensors)
    if job.given.optimizers or policy.level is not Level.O2 or policy.master is Master.NONE:
        return
    if trained and any(model.training for model in job.given.models):
        warnings.warn(
            "decorate(model) without an optimizer keeps no masters: updates smaller than the parameters' 16-bit steps will be lost. "
            "Pass the optimizer; for inference call model.eval() first; or say that it is meant: master=None.",
            UserWarning,
            stacklevel=3,
        )


def _apply(job: Job) -> None:
    """Carry a plan out. Whatever fails, what was done before it is undone, tensors last."""
    with ExitStack() as rollback, ExitStack() as undo:
        masters = {optimizer: Masters(job.plan.master, job.plan.seed) for optimizer in job.given.optimizers}
        weights = _convert(job, masters, rollback)
        for aligned in job.aligned:
            undo.callback(align.apply(aligned))
        decoration = Decoration(job.plan, job.given.models, job.given.optimizers, weights)
        for model in job.given.models:
            _open(job, model, decoration, undo)
        for optimizer in job.given.optimizers:
            _bind(job, optimizer, masters[optimizer], weights, undo)
        for one in both(job.given.models, job.given.optimizers):
            undo.callback(mark(one, decoration))
        decoration.steps = undo.pop_all()
        rollback.pop_all()


def _convert(job: Job, masters: dict[Optimizer, Masters], rollback: ExitStack) -> Weights:
    weights, frozen, buffers = Weights(), Masters(Master.NONE), Masters(Master.FLOAT32)
    for planned in job.tensors:
        if planned.converted:
            tensor, optimizer, half = planned.found.tensor, planned.found.optimizer, planned.row.after
            if optimizer is not None and tensor.requires_grad:
                keeper = masters[optimizer]
            else:
                keeper = buffers if planned.row.master else frozen
            weights.adopt(tensor, half, job.plan.policy.grad_dtype or half, keeper, rollback)
    flatten_rnns(job.given.models)
    return weights


def _open(job: Job, model: nn.Module, decoration: Decoration, undo: ExitStack) -> None:
    """Let a model run by the policy, and be loaded and saved exactly."""
    plan = job.plan
    region = region_of(plan.policy, plan.device)
    binding = bind_modules(plan.policy, region, model) if plan.policy.modules else None
    if binding is not None:
        undo.callback(binding.apply_in_all_threads())
    inputs = plan.dtype if plan.converts else None
    undo.callback(door.hang(door.Door(region, inputs, plan.output_dtype, plan.yields), model))
    undo.callback(guard(model, converted=plan.converts))
    weight_hooks.install(model, decoration, undo, save_exact=plan.save_dtype is not None)


def _bind(job: Job, optimizer: Optimizer, masters: Masters, weights: Weights, undo: ExitStack) -> None:
    """Let an optimizer step over exact weights; where parameters stay float32 and nothing is clipped, it is left alone."""
    if not job.plan.converts and job.plan.clip_norm is None:
        return
    bound = bind(optimizer, masters, clip_norm=job.plan.clip_norm)
    undo.callback(bound.unbind)
    if job.plan.converts:
        saved.install(optimizer, masters, undo)
        thaw.watch(bound, weights, undo)
