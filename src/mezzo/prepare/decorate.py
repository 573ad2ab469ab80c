"""`mezzo.decorate` and `mezzo.undecorate`: plan what to change, apply it, and undo it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, TypeVar, overload

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import PolicyError, UnsupportedError, user_stack_level
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.autocast import bind_module_rules
from mezzo.optim import state_dict
from mezzo.optim.bind_optimizer import bind_optimizer, cast_state
from mezzo.optim.master_weights import MasterWeights
from mezzo.policy.types import Level, Master
from mezzo.prepare import forward, half_weights, model_state_dict
from mezzo.prepare.arguments import (
    Models,
    Optimizer,
    Optimizers,
    is_inside_ddp,
    models_of,
    optimizers_of,
)
from mezzo.prepare.decoration import Decoration, all_decorated, decoration_of, flatten_rnns, mark
from mezzo.prepare.half_weights import HalfWeights
from mezzo.prepare.norms import keep_input_dtype
from mezzo.prepare.plan import DecoratePlan, Dtype, PolicyArg, input_dtype_of, make_plan
from mezzo.prepare.sharding import refuse_replaced_parameters, refuse_undo

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
    """Prepare a model and its optimizer in place for training or inference with a policy.

    The model's forward runs in the policy's autocast region. At O2 parameters are cast to 16 bits,
    the optimizer's step updates master weights in float32, and `state_dict()` saves and loads them;
    ops run in the precisions of O1. At O3 buffers and inputs are cast too. Model, optimizer and
    parameters stay the same objects. If an error is raised, nothing is changed.

    `mezzo.plan` with the same arguments returns what would change; `mezzo.undecorate` restores
    everything. Move the model to its device first, and wrap it (DistributedDataParallel,
    `torch.compile`) afterwards.

    Shard a model before: first `torch.distributed.fsdp.fully_shard(model)`, then create the
    optimizer, then decorate, before the first forward pass. At O2 the shards stay float32 and are
    the master weights; they are gathered in 16 bits, and gradients are reduced in float32
    (`grad_dtype=` for another dtype). With `master="split"`, `"kahan"` or `"stochastic"` the shards
    and their gradients are stored in 16 bits, which takes 2 or 4 bytes less for each parameter.
    Clipping and skipped steps hold for all processes.

    A deep copy of a decorated model is a 16-bit model without master weights: use `mezzo.EMA` to
    average weights, and `mezzo.master_params` to read exact ones.

    Args:
        model: The model, or a list of models.
        optimizer: The optimizer of these models, or a list of optimizers. Without one there are no
            master weights, as for inference.
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file.
        clip_norm: Clip the unscaled gradients of each optimizer to this norm in its step;
            `mezzo.grad_norm` returns the norm.
        output_dtype: Cast floating-point outputs of the models to this dtype.
        save_dtype: With `"float32"`, `model.state_dict()` returns exact float32 weights.
        seed: Seed of stochastic rounding (`master="stochastic"`).
        defer_to_autocast: If the model is called in an enabled autocast region, use that region
            instead of the model's own.
        **overrides: Fields of the policy to change, such as `dtype=`, `master=` or `keep_full=`.

    Returns:
        The model, or the pair of model and optimizer: the objects that were passed.

    >>> import mezzo, torch
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> model.weight.dtype, mezzo.undecorate(model).weight.dtype
    (torch.bfloat16, torch.float32)
    """
    _refuse_decorated(model, optimizer)
    planned = make_plan(
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
    _refuse_wrapped_parameters(planned)
    _warn_of_lost_updates(planned)
    _warn_of_half_parameters(planned)
    _apply(planned)
    return model if optimizer is None else (model, optimizer)


@overload
def undecorate(model: ModelT, optimizer: None = None) -> ModelT: ...
@overload
def undecorate(model: ModelT, optimizer: OptimizerT) -> tuple[ModelT, OptimizerT]: ...
def undecorate(model: Models, optimizer: Optimizers | None = None) -> Any:
    """Restore what `decorate` changed, in place.

    Parameters become float32 with their current master values; forward, step and hooks are the
    original ones. The optimizer keeps its state.

    Args:
        model: The decorated model, or the list of all models that were decorated together.
        optimizer: The optimizers that were decorated with it. They are restored in any case.

    Returns:
        The model, or the pair of model and optimizer: the objects that were passed.

    >>> import mezzo
    >>> model = mezzo.decorate(nn.Linear(4, 2).eval(), dtype="bfloat16")
    >>> mezzo.undecorate(model).weight.dtype
    torch.float32
    """
    models, optimizers = models_of(model), optimizers_of(optimizer)
    decorations = {decoration_of(owner) for owner in all_decorated(models, optimizers)}
    decoration = decorations.pop() if len(decorations) == 1 else None
    if decoration is None:
        raise PolicyError(
            "These were not decorated, or not together: undecorate(model) takes the model that was"
            " passed to mezzo.decorate, not a copy of it."
        )
    if len(models) != len(decoration.models):
        raise PolicyError(
            f"{len(decoration.models)} models were decorated together, got {len(models)}. Pass all"
            " of them, as to decorate."
        )
    if decoration.plan.sharded and decoration.plan.policy.level is not Level.O1:
        refuse_undo(decoration.models)
    decoration.undo()
    return model if optimizer is None else (model, optimizer)


def _refuse_decorated(model: Models, optimizer: Optimizers | None) -> None:
    modules = (module for root in models_of(model) for module in root.modules())
    for owner in all_decorated(modules, optimizers_of(optimizer)):
        if decoration_of(owner) is not None:
            raise PolicyError(
                f"This {type(owner).__name__} is decorated already. Call mezzo.undecorate(model,"
                " optimizer) first, then decorate again."
            )


def _refuse_wrapped_parameters(planned: DecoratePlan) -> None:
    """Raise if DistributedDataParallel has already hooked parameters that would be cast."""
    if planned.plan.converts and is_inside_ddp(planned.targets.models):
        level = planned.plan.policy.level.value
        raise UnsupportedError(
            f"The model is wrapped by DistributedDataParallel already, and {level} casts its"
            " parameters: the wrapper would not see their gradients any more. First decorate, then"
            f" wrap: model, optimizer = mezzo.decorate(model, optimizer, {level!r}); ddp ="
            " DistributedDataParallel(model). A training step takes the wrapper:"
            " mezzo.TrainStep(ddp, loss_fn, optimizer)."
        )


def _warn_of_lost_updates(planned: DecoratePlan) -> None:
    policy = planned.plan.policy
    if planned.targets.optimizers or policy.level is not Level.O2 or policy.master is Master.NONE:
        return
    is_trained = any(
        tensor.converted and tensor.info.tensor.requires_grad for tensor in planned.tensors
    )
    if is_trained and any(model.training for model in planned.targets.models):
        warnings.warn(
            "decorate(model) without an optimizer keeps no master weights: updates that are small"
            " for 16 bits will be lost. Pass the optimizer; for inference call model.eval() first;"
            " or pass master=None to silence this warning.",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def _warn_of_half_parameters(planned: DecoratePlan) -> None:
    """Warn of parameters that are 16-bit already, and would be trained without masters at O1."""
    half = [
        tensor.row
        for tensor in planned.tensors
        if tensor.row.before in HALF_DTYPES
        and tensor.info.optimizer
        and tensor.info.tensor.requires_grad
    ]
    if half and planned.plan.policy.level is Level.O1:
        warnings.warn(
            f"{len(half)} trained parameters are 16-bit already, such as {half[0].name!r}"
            f" ({dtype_name(half[0].before)}), and O1 keeps no master weights: small updates are"
            " lost, and Adam may divide by an eps that is 0 in float16. Use policy 'O2', which adds"
            " master weights, or load the model in float32.",
            UserWarning,
            stacklevel=user_stack_level(),
        )


# -- apply -----------------------------------------------------------------------------------------


def _apply(planned: DecoratePlan) -> None:
    """Apply a plan: cast tensors, wrap models, bind optimizers. An error undoes all of it.

    `rollback` restores tensors, and is used only on an error, after the decoration's own callbacks.
    """
    with ExitStack() as rollback:
        masters = {
            optimizer: MasterWeights(planned.plan.master, planned.plan.seed)
            for optimizer in planned.targets.optimizers
        }
        weights = _cast_tensors(planned, masters, rollback)
        decoration = Decoration(
            planned.plan, planned.targets.models, planned.targets.optimizers, weights
        )
        undo = rollback.enter_context(decoration.undo_stack)
        for layer in planned.faster_layers:
            undo.callback(layer.apply())
        for norm in planned.norms:
            undo.callback(keep_input_dtype(norm, planned.plan.device))
        for group in planned.groups:
            undo.callback(group.apply())
        for model in planned.targets.models:
            _wrap_model(planned, model, decoration, undo)
        for optimizer in planned.targets.optimizers:
            _bind_optimizer(planned, optimizer, masters[optimizer], weights, undo)
            undo.callback(refuse_replaced_parameters(optimizer, planned.targets.models))
        for owner in all_decorated(planned.targets.models, planned.targets.optimizers):
            undo.callback(mark(owner, decoration))
        rollback.pop_all()


def _cast_tensors(
    planned: DecoratePlan, masters: dict[Optimizer, MasterWeights], rollback: ExitStack
) -> HalfWeights:
    """Cast parameters and buffers, and store the float32 values of those that have masters."""
    weights = HalfWeights()
    # FSDP2 reduces in the policy's dtype, and stores gradients in that of their shards.
    grad_dtype = None if planned.plan.sharded else planned.plan.policy.grad_dtype
    without_master, of_buffers = MasterWeights(Master.NONE), MasterWeights(Master.FLOAT32)
    for cast in planned.tensors:
        if cast.converted:
            tensor, optimizer, dtype = cast.info.tensor, cast.info.optimizer, cast.row.after
            if optimizer is not None and tensor.requires_grad:
                store = masters[optimizer]
                cast_state(optimizer, tensor)
            else:
                store = of_buffers if cast.row.master else without_master
            weights.convert(tensor, dtype, grad_dtype or dtype, store, rollback)
    flatten_rnns(planned.targets.models)
    return weights


def _wrap_model(
    planned: DecoratePlan, model: nn.Module, decoration: Decoration, undo: ExitStack
) -> None:
    """Run a model's forward by the policy, and let its state dict hold exact weights."""
    plan = planned.plan
    region = region_for(plan.policy, plan.device)
    binding = bind_module_rules(plan.policy, region, model) if plan.policy.modules else None
    if binding is not None:
        undo.callback(binding.apply_in_all_threads())
    wrapper = forward.ForwardWrapper(
        region,
        input_dtype=input_dtype_of(plan),
        output_dtype=plan.output_dtype,
        defer_to_autocast=plan.defer_to_autocast,
    )
    undo.callback(forward.wrap_forward(wrapper, model))
    undo.callback(refuse_moves(model, converted=plan.converts or bool(planned.groups)))
    model_state_dict.hook_model_state_dict(
        model, decoration, undo, save_exact=plan.save_dtype is not None
    )


def _bind_optimizer(
    planned: DecoratePlan,
    optimizer: Optimizer,
    masters: MasterWeights,
    weights: HalfWeights,
    undo: ExitStack,
) -> None:
    """Bind an optimizer to its master weights, unless parameters stay float32 without clipping.

    The optimizer of a sharded model at O2 is bound too: its fused step updates the float32 shards.
    """
    plan = planned.plan
    if not plan.converts and plan.clip_norm is None and not planned.groups:
        return
    binding = bind_optimizer(
        optimizer,
        masters,
        clip_norm=plan.clip_norm,
        takes_scale=plan.dtype is not torch.bfloat16,
    )
    undo.callback(binding.unbind)
    if plan.converts:
        state_dict.hook_state_dict(optimizer, masters, undo)
        half_weights.add_masters_when_trained(binding, weights)


# -- moves -----------------------------------------------------------------------------------------

Function = Callable[[torch.Tensor], torch.Tensor]


def refuse_moves(model: nn.Module, *, converted: bool) -> Callable[[], None]:
    """Make `.to()` and the like raise errors; return a function that allows them again.

    Refuses other device types. If parameters were cast or are sharded at O2, refuses every other
    device and dtype, also for each submodule: master weights would not follow.
    """
    guarded = {"": model}
    if converted:
        # A class that defines its pickles would pickle the guard, which refers to the module again.
        modules = model.named_modules()
        guarded |= {name: module for name, module in modules if not forward.pickles_itself(module)}
    for name, module in guarded.items():
        module.__dict__["_apply"] = _MoveGuard(module, name, converted=converted)
    return partial(_allow_moves, list(guarded.values()))


def _allow_moves(modules: list[nn.Module]) -> None:
    for module in modules:
        module.__dict__.pop("_apply", None)


class _MoveGuard:
    """The `_apply` of a guarded module, with which torch moves and casts its tensors."""

    def __init__(self, module: nn.Module, name: str, *, converted: bool) -> None:
        self._module, self._name, self._converted = module, name, converted

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        # Check every tensor before the first is moved.
        for name, tensor in chain(
            self._module.named_parameters(self._name), self._module.named_buffers(self._name)
        ):
            if tensor.is_floating_point():
                self._refuse_move(name, tensor, function)
        return type(self._module)._apply(self._module, function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy the `_apply` of its class: it has no master weights, and may be moved."""
        return getattr, (self._module, "_apply")

    def _refuse_move(self, name: str, tensor: torch.Tensor, function: Function) -> None:
        # Called with an empty tensor, so that nothing is moved to find out.
        before = tensor.detach().new_empty(0)
        after = function(before)
        moves = (
            (after.device, after.dtype) != (before.device, before.dtype)
            if self._converted
            else after.device.type != before.device.type
        )
        if moves:
            raise UnsupportedError(
                f"The model is decorated: {name!r} cannot be moved from {before.dtype} on"
                f" {before.device} to {after.dtype} on {after.device}. First move, then decorate;"
                " or call mezzo.undecorate(model), move it, and decorate it again."
                f"{_keep_full_remedy(name, before, after)}"
            )


def _keep_full_remedy(name: str, before: torch.Tensor, after: torch.Tensor) -> str:
    """Return what to do if the model itself casts a module to float32, as some routers do."""
    if before.dtype not in HALF_DTYPES or after.dtype is not torch.float32:
        return ""
    owner = name.rpartition(".")[0]
    return (
        " If the model's forward pass does this, keep the module in float32:"
        f" decorate with keep_full={{*mezzo.NORMS, {owner!r}}}."
    )
