"""`decorate` and `undecorate` a model and its optimizers; refuse moves that would lose master weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, TypeVar, overload

import torch
from torch import nn

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.autocast import bind_module_rules
from mezzo.optim import state_dict
from mezzo.optim.attach import bind_optimizer
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.types import Level, Master
from mezzo.prepare import forward, half_weights, model_state_dict
from mezzo.prepare.arguments import Models, Optimizer, Optimizers, models_of, optimizers_of
from mezzo.prepare.decoration import Decoration, all_decorated, decoration_of, flatten_rnns, mark
from mezzo.prepare.half_weights import HalfWeights
from mezzo.prepare.plan import DecoratePlan, Dtype, PolicyArg, make_plan

Function = Callable[[torch.Tensor], torch.Tensor]


def refuse_moves(model: nn.Module, *, converted: bool) -> Callable[[], None]:
    """Refuse another device type, and where parameters are 16-bit every other device and dtype, of each part too; what comes back takes the guard off."""
    guarded = dict(model.named_modules()) if converted else {"": model}
    for name, module in guarded.items():
        module.__dict__["_apply"] = _MoveGuard(module, name, converted=converted)
    return partial(_take_off, list(guarded.values()))


def _take_off(modules: list[nn.Module]) -> None:
    for module in modules:
        module.__dict__.pop("_apply", None)


class _MoveGuard:
    """The `_apply` of a guarded module, through which torch moves and casts."""

    def __init__(self, module: nn.Module, name: str, *, converted: bool) -> None:
        self._module, self._name, self._converted = module, name, converted

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        # Every tensor is looked at before the first is moved.
        for name, tensor in chain(
            self._module.named_parameters(self._name), self._module.named_buffers(self._name)
        ):
            if tensor.is_floating_point():
                self._refuse_move(name, tensor, function)
        return type(self._module)._apply(self._module, function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, has no masters, and goes where it likes: it gets the `_apply` of its class."""
        return getattr, (self._module, "_apply")

    def _refuse_move(self, name: str, tensor: torch.Tensor, function: Function) -> None:
        # Asked of a tensor without elements: nothing is moved to find out.
        before = tensor.detach().new_empty(0)
        after = function(before)
        away = (
            (after.device, after.dtype) != (before.device, before.dtype)
            if self._converted
            else after.device.type != before.device.type
        )
        if away:
            raise UnsupportedError(
                f"The model is decorated, and {name!r} would go from {before.dtype} on"
                f" {before.device} to {after.dtype} on {after.device}, away from what was planned"
                " for it. First move, then decorate; or mezzo.undecorate(model), move it, and"
                " decorate anew."
            )


ModelT = TypeVar("ModelT", bound=Models)
OptimizerT = TypeVar("OptimizerT", bound=Optimizers)


@overload
def decorate(
    model: ModelT,
    optimizer: None = None,
    policy: PolicyArg = "O2",
    *,
    clip_norm: float | None = None,
    output_dtype: Dtype = None,
    save_dtype: Dtype = None,
    seed: int = 0,
    defer_to_autocast: bool = False,
    **overrides: Any,
) -> ModelT: ...
@overload
def decorate(
    model: ModelT,
    optimizer: OptimizerT,
    policy: PolicyArg = "O2",
    *,
    clip_norm: float | None = None,
    output_dtype: Dtype = None,
    save_dtype: Dtype = None,
    seed: int = 0,
    defer_to_autocast: bool = False,
    **overrides: Any,
) -> tuple[ModelT, OptimizerT]: ...
def decorate(
    model: Models,
    optimizer: Optimizers | None = None,
    policy: PolicyArg = "O2",
    *,
    clip_norm: float | None = None,
    output_dtype: Dtype = None,
    save_dtype: Dtype = None,
    seed: int = 0,
    defer_to_autocast: bool = False,
    **overrides: Any,
) -> Any:
    """Make a model and its optimizer ready for a policy, whole or not at all: both stay the objects they were, and so do the parameters.

    `mezzo.plan` with the same arguments says what will happen; `mezzo.undecorate` puts everything
    back. Inside an `autocast` that is on, a model with `defer_to_autocast=True` runs as that says,
    and by its own policy everywhere else.

    A deep copy of a decorated model is a 16-bit model without masters: average weights with
    `mezzo.EMA`, and read exact ones with `mezzo.master_params`.

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
    job = make_plan(
        model,
        optimizer,
        policy,
        clip_norm=clip_norm,
        output_dtype=output_dtype,
        save_dtype=save_dtype,
        seed=seed,
        defer_to_autocast=defer_to_autocast,
        **overrides,
    )
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
    found = {decoration_of(one) for one in all_decorated(models, optimizers)}
    decoration = found.pop() if len(found) == 1 else None
    if decoration is None:
        raise PolicyError(
            "These were not decorated, or not together: undecorate(model) takes the model that went"
            " through mezzo.decorate, not a copy of it."
        )
    if len(models) != len(decoration.models):
        raise PolicyError(
            f"{len(decoration.models)} models were decorated together, got {len(models)}. Pass all"
            " of them, as to decorate."
        )
    decoration.undo()
    return model if optimizer is None else (model, optimizer)


def _refuse_twice(model: Models, optimizer: Optimizers | None) -> None:
    for one in all_decorated(
        (part for whole in models_of(model) for part in whole.modules()), optimizers_of(optimizer)
    ):
        if decoration_of(one) is not None:
            raise PolicyError(
                f"This {type(one).__name__} is decorated already. Call mezzo.undecorate(model,"
                " optimizer) first, then decorate anew."
            )


def _warn_of_lost_updates(job: DecoratePlan) -> None:
    policy, trained = (
        job.plan.policy,
        any(one.converted and one.info.tensor.requires_grad for one in job.tensors),
    )
    if job.targets.optimizers or policy.level is not Level.O2 or policy.master is Master.NONE:
        return
    if trained and any(model.training for model in job.targets.models):
        warnings.warn(
            "decorate(model) without an optimizer keeps no masters: updates smaller than the"
            " parameters' 16-bit steps will be lost. Pass the optimizer; for inference call"
            " model.eval() first; or say that it is meant: master=None.",
            UserWarning,
            stacklevel=3,
        )


def _apply(job: DecoratePlan) -> None:
    """Carry a plan out. Whatever fails, what was done before it is undone, tensors last."""
    with ExitStack() as rollback, ExitStack() as undo:
        masters = {
            optimizer: MasterWeights(job.plan.master, job.plan.seed)
            for optimizer in job.targets.optimizers
        }
        weights = _convert(job, masters, rollback)
        for aligned in job.padded:
            undo.callback(forward.pad_outputs(aligned))
        decoration = Decoration(job.plan, job.targets.models, job.targets.optimizers, weights)
        for model in job.targets.models:
            _open(job, model, decoration, undo)
        for optimizer in job.targets.optimizers:
            _bind(job, optimizer, masters[optimizer], weights, undo)
        for one in all_decorated(job.targets.models, job.targets.optimizers):
            undo.callback(mark(one, decoration))
        decoration.undo_stack = undo.pop_all()
        rollback.pop_all()


def _convert(
    job: DecoratePlan, masters: dict[Optimizer, MasterWeights], rollback: ExitStack
) -> HalfWeights:
    weights, frozen, buffers = (
        HalfWeights(),
        MasterWeights(Master.NONE),
        MasterWeights(Master.FLOAT32),
    )
    for planned in job.tensors:
        if planned.converted:
            tensor, optimizer, half = planned.info.tensor, planned.info.optimizer, planned.row.after
            if optimizer is not None and tensor.requires_grad:
                keeper = masters[optimizer]
            else:
                keeper = buffers if planned.row.master else frozen
            weights.convert(tensor, half, job.plan.policy.grad_dtype or half, keeper, rollback)
    flatten_rnns(job.targets.models)
    return weights


def _open(job: DecoratePlan, model: nn.Module, decoration: Decoration, undo: ExitStack) -> None:
    """Let a model run by the policy, and be loaded and saved exactly."""
    plan = job.plan
    region = region_for(plan.policy, plan.device)
    binding = bind_module_rules(plan.policy, region, model) if plan.policy.modules else None
    if binding is not None:
        undo.callback(binding.apply_in_all_threads())
    inputs = plan.dtype if plan.converts else None
    undo.callback(
        forward.wrap_forward(
            forward.ForwardWrapper(region, inputs, plan.output_dtype, plan.defer_to_autocast), model
        )
    )
    undo.callback(refuse_moves(model, converted=plan.converts))
    model_state_dict.hook_model_state_dict(
        model, decoration, undo, save_exact=plan.save_dtype is not None
    )


def _bind(
    job: DecoratePlan,
    optimizer: Optimizer,
    masters: MasterWeights,
    weights: HalfWeights,
    undo: ExitStack,
) -> None:
    """Let an optimizer step over exact weights; where parameters stay float32 and nothing is clipped, it is left alone."""
    if not job.plan.converts and job.plan.clip_norm is None:
        return
    bound = bind_optimizer(optimizer, masters, clip_norm=job.plan.clip_norm)
    undo.callback(bound.unbind)
    if job.plan.converts:
        state_dict.hook_state_dict(optimizer, masters, undo)
        half_weights.add_masters_when_trained(bound, weights, undo)
