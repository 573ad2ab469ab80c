"""Models sharded by FSDP2: their shards and 16-bit compute at O2, and what is not supported.

The float32 shards are the master weights: each group of parameters is gathered in 16 bits, and its
gradients are reduced in float32. torch's `MixedPrecisionPolicy` of the group does both. With split,
Kahan or stochastic masters the shards and their gradients are 16-bit too, which saves memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._torch import (
    BatchOrInstanceNorm,
    FsdpGroup,
    fsdp_groups,
    fsdp_reduce_dtype,
    fsdp_reset_refusal,
)
from mezzo.optim.binding import optimizer_binding
from mezzo.policy.policy import Policy
from mezzo.policy.presets import is_torch
from mezzo.policy.types import NORMS, Level, Master, Selector
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.keep_full import KeepFull
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import any_sharded, is_sharded, mesh_of, named_shards

Models = tuple[nn.Module, ...]

_ORDER = (
    "First fully_shard(model), then create the optimizer from model.parameters(), then"
    " mezzo.decorate(model, optimizer, ...)."
)
_DEFAULT = frozenset(Selector.parse(kind) for kind in NORMS)
_STRICT = Selector.parse(BatchOrInstanceNorm)
"""Layers whose kernels need float32 parameters besides their float32 statistics."""
_OF_16_BIT_SHARDS = frozenset({Master.SPLIT, Master.KAHAN, Master.STOCHASTIC})


@dataclass(frozen=True, eq=False)
class GroupPrecision:
    """A group of parameters that are gathered together, and the precision to give it."""

    group: FsdpGroup
    policy: Any
    """The new `MixedPrecisionPolicy`; the current one if the user has set it."""
    casts_shards: bool
    """Whether shards are cast to 16 bits. All of a group are: FSDP2 gathers and reduces tensors of
    one dtype."""

    @property
    def reason(self) -> str:
        """How the parameters of this group are stored, gathered and reduced."""
        gathered = self.policy.param_dtype or torch.float32
        stored = gathered if self.casts_shards else torch.float32
        reduced = fsdp_reduce_dtype(self.policy, stored)
        return (
            f"{dtype_name(stored)} shard, gathered in {dtype_name(gathered)}, gradient reduced in"
            f" {dtype_name(reduced)}"
        )

    def apply(self) -> Callable[[], None]:
        """Set the policy of the group; return a function that restores the current one."""
        self.group.set_policy(self.policy)
        return partial(self.group.set_policy, self.group.policy)


def is_sharded_model(models: Models) -> bool:
    """Return whether FSDP2 or tensor parallelism has sharded parameters of a model."""
    # A model that has run may hold whole parameters of its last group for a while.
    return any(any_sharded(model.parameters()) or fsdp_groups(model) for model in models)


def casts_shards(master: Master) -> bool:
    """Return whether shards are 16-bit with a master format: if that takes fewer bytes.

    A float32 shard and its gradient have 8 bytes. A 16-bit shard, its gradient and its companion
    have 8 too with float32 masters, 6 with split and Kahan masters, and 4 without a companion.
    """
    return master in _OF_16_BIT_SHARDS


def sharding_obstacle(models: Models) -> str | None:
    """Return why steps of sharded models cannot be captured as a CUDA graph, or None if they can.

    FSDP2 alone is captured, over all processes or one dimension of a mesh.
    """
    grouped = {
        id(parameter)
        for model in models
        for group in fsdp_groups(model)
        for parameter in group.parameters
    }
    sharded: list[Any] = [
        parameter for model in models for parameter in model.parameters() if is_sharded(parameter)
    ]
    if any(id(parameter) not in grouped or not _is_plain_fsdp(parameter) for parameter in sharded):
        return "tensor parallelism has sharded the model, which is not captured"
    mesh = mesh_of(sharded)
    if mesh is not None and len(mesh.groups) > 1:
        return "the model is sharded over several dimensions of a part of the processes"
    backends = {
        distributed.get_backend_config(parameter.device_mesh.get_group(dimension))
        for parameter in sharded
        for dimension in range(parameter.device_mesh.ndim)
    }
    if any("cuda:nccl" not in backend for backend in backends):
        return f"the model is sharded by {', '.join(sorted(backends))}; only NCCL is captured"
    if not distributed.is_gloo_available():
        return "torch has no gloo, by which ranks agree what to capture"
    return next((why for model in models if (why := fsdp_reset_refusal(model)) is not None), None)


def _is_plain_fsdp(parameter: Any) -> bool:
    """Return whether a parameter is sharded in its last mesh dimension, and copied in others."""
    *others, last = parameter.placements
    return last.is_shard() and all(placement.is_replicate() for placement in others)


def plan_groups(
    models: Models,
    policy: Policy,
    half: torch.dtype,
    keep_full: KeepFull,
    optimizers: tuple[Optimizer, ...],
) -> tuple[GroupPrecision, ...]:
    """Choose the precision of each group of sharded models at O2; raise for what cannot be."""
    groups = [group for model in models for group in fsdp_groups(model)]
    names = {
        id(parameter): name for model in models for name, parameter in model.named_parameters()
    }
    _refuse_unsharded(names, groups, models)
    _refuse_policy(policy, optimizers)
    if any(group.has_run for group in groups):
        raise UnsupportedError(
            "The sharded model has run already, and FSDP2 fixes the dtypes of its groups at the"
            f" first forward pass. Decorate before it. {_ORDER}"
        )
    kept, strictly_kept = (
        {id(parameter) for model in models for parameter in _kept(model, keep)}
        for keep in (keep_full, _without_plain_norms(keep_full))
    )
    return tuple(
        _precision(group, policy, half, names, kept=kept, strictly_kept=strictly_kept)
        for group in groups
    )


def _refuse_policy(policy: Policy, optimizers: tuple[Optimizer, ...]) -> None:
    if policy.level is Level.O3:
        raise PolicyError(
            "O3 trains 16-bit parameters without masters, and the shards of a sharded model need"
            " them. Use policy 'O2', which computes in 16 bits; with master='split' or 'stochastic'"
            " its shards are 16-bit too."
        )
    if policy.master is Master.NONE:
        raise PolicyError(
            "master='none' loses small updates of 16-bit shards. Leave master= out for float32"
            " shards, or use master='stochastic', which stores as few bytes."
        )
    if casts_shards(policy.master) and not optimizers:
        raise PolicyError(
            f"master={policy.master.value!r} stores 16-bit shards with the masters of an optimizer,"
            " and no optimizer was given. Pass it, created after fully_shard(model), or leave"
            " master= out."
        )
    if not is_torch(policy.preset):
        raise PolicyError(
            f"preset={policy.preset!r} casts parameters in another way than FSDP2 gathers them. Use"
            " policy 'O2' of mezzo for a sharded model."
        )


def _refuse_unsharded(names: dict[int, str], groups: list[FsdpGroup], models: Models) -> None:
    """Raise for parameters that FSDP2 does not shard, alone or after tensor parallelism."""
    managed = {id(parameter) for group in groups for parameter in group.parameters}
    others = [
        parameter
        for model in models
        for parameter in model.parameters()
        if id(parameter) not in managed and parameter.is_floating_point()
    ]
    if not others:
        return
    # Name a parameter that tensor parallelism has split, if any: it explains the others.
    parameter = next(filter(is_sharded, others), others[0])
    how = (
        "is split by tensor parallelism alone: only FSDP2 gathers 16-bit copies of float32 shards"
        if is_sharded(parameter)
        else "is not sharded, while others are"
    )
    raise UnsupportedError(
        f"The parameter {names[id(parameter)]!r} {how}. At O2 shard the whole model:"
        " fully_shard(model), after parallelize_module if you use it; or use policy 'O1', which"
        " computes in 16 bits without casting parameters."
    )


def _kept(model: nn.Module, keep: KeepFull) -> list[nn.Parameter]:
    reasons = keep.reasons(model)
    return [
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in reasons
    ]


def _without_plain_norms(keep: KeepFull) -> KeepFull:
    """Return what must be gathered in float32.

    Layer, group and RMS norms compute in float32 from 16-bit weights too, as at O2 without shards.
    """
    required = tuple(
        selector for selector in keep.selectors if selector not in _DEFAULT or selector == _STRICT
    )
    return replace(keep, selectors=required)


def _precision(
    group: FsdpGroup,
    policy: Policy,
    half: torch.dtype,
    names: dict[int, str],
    *,
    kept: set[int],
    strictly_kept: set[int],
) -> GroupPrecision:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 - slow to import

    trained = [parameter for parameter in group.parameters if parameter.is_floating_point()]
    stays = bool(trained) and all(id(parameter) in kept for parameter in trained)
    required = [
        names.get(id(parameter), "") for parameter in trained if id(parameter) in strictly_kept
    ]
    if group.policy != MixedPrecisionPolicy():
        if group.policy.param_dtype is not half or (required and not stays):
            _refuse_group_policy(group, half)
        stays = False
        chosen = group.policy
    else:
        chosen = MixedPrecisionPolicy(
            param_dtype=None if stays else half,
            # Explicit: torch's own default depends on its version.
            reduce_dtype=policy.grad_dtype or torch.float32,
            cast_forward_inputs=False,
        )
    if required and not stays:
        parent = required[0].rpartition(".")[0]
        raise UnsupportedError(
            f"keep_full keeps {required[0]!r} in float32, but FSDP2 gathers it together with"
            f" parameters in {dtype_name(half)}. Shard each such module by itself, before the"
            f" module around it: fully_shard(model.get_submodule({parent!r}))."
        )
    return GroupPrecision(group, chosen, casts_shards(policy.master) and not stays)


def _refuse_group_policy(group: FsdpGroup, half: torch.dtype) -> None:
    raise PolicyError(
        f"{type(group.module).__name__} was sharded with mp_policy={group.policy}, but the policy"
        f" computes in {dtype_name(half)}. Leave mp_policy out of fully_shard(...): decorate sets"
        f" it. Or pass MixedPrecisionPolicy(param_dtype={half}, reduce_dtype=torch.float32,"
        " cast_forward_inputs=False)."
    )


def refuse_undo(models: Models) -> None:
    """Raise `UnsupportedError` if forward passes have fixed the dtypes of sharded models."""
    if any(group.has_run for model in models for group in fsdp_groups(model)):
        raise UnsupportedError(
            "A sharded model cannot be undecorated after it has run at O2: FSDP2 fixes the dtypes"
            " of its groups at the first forward pass. Save a mezzo.save_checkpoint, and load it"
            " into a new model."
        )


# -- optimizers whose parameters were replaced -----------------------------------------------------


def refuse_replaced_parameters(optimizer: Optimizer, models: Models) -> Callable[[], None]:
    """Check at an optimizer's first step that its parameters are still the models'.

    `fully_shard` and `parallelize_module` replace the parameters of a model: an optimizer that was
    decorated before would train nothing. Returns a function that removes the check.
    """
    decorated = parameters(optimizer)
    if any_sharded(decorated):
        return _do_nothing
    check = partial(refuse_lost_parameters, optimizer, decorated, models)
    binding = optimizer_binding(optimizer)
    if binding is not None:
        return binding.check_first_step_with(check)
    is_checked = False

    def before_step(*_: Any) -> None:
        # Not removed after the first step: torch iterates over the hooks while it calls them.
        nonlocal is_checked
        if not is_checked:
            check()
        is_checked = True

    try:
        handle: Any = optimizer.register_step_pre_hook(before_step)
    except AttributeError:
        # A wrapper that does not initialize its base class has no hooks.
        return _do_nothing
    remove: Callable[[], None] = handle.remove
    return remove


def _do_nothing() -> None:
    pass


def refuse_lost_parameters(
    optimizer: Optimizer, decorated: list[torch.Tensor], models: Models
) -> None:
    """Raise `UnsupportedError` if sharded models lack parameters of an optimizer, or others all."""
    present = {id(parameter) for model in models for _, parameter in named_shards(model)}
    lost = [parameter for parameter in decorated if id(parameter) not in present]
    sharded = is_sharded_model(models)
    if lost and (sharded or len(lost) == len(decorated)):
        why = (
            "it was sharded after it was decorated"
            if sharded
            else "other code has replaced them since mezzo.decorate"
        )
        raise UnsupportedError(
            f"{len(lost)} of the {len(decorated)} parameters of this {type(optimizer).__name__} are"
            f" no longer the model's: {why}. A step would not train the model."
            f" {_ORDER if sharded else 'Create the optimizer and decorate again.'}"
        )
