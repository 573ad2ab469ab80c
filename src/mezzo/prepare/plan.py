"""`mezzo.plan`: what `decorate` would change, as a value that can be printed and tested."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES, dtype_name, parse_dtype
from mezzo._errors import PolicyError
from mezzo._hardware import hardware
from mezzo.optim.bind_optimizer import is_zero_redundancy, refuse_wrapper
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.policy.decide import ResolvedDtype, resolve_dtype
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Master
from mezzo.prepare.arguments import Models, Optimizers, Targets, read_targets
from mezzo.prepare.faster_layers import FasterLayer, find_faster_layers
from mezzo.prepare.keep_full import KeepFull, casts_only_parameters, read_keep_full
from mezzo.prepare.norms import find_norms
from mezzo.prepare.plan_rows import (
    PlannedTensor,
    PlanRow,
    TensorInfo,
    TensorRule,
    format_bytes,
    format_rows,
    list_tensors,
)
from mezzo.prepare.sharding import (
    GroupPrecision,
    casts_shards,
    is_sharded_model,
    plan_groups,
)

PolicyArg = Policy | str | os.PathLike[str] | Level | None
"""A policy, as every entry point takes it: a level, a `Policy`, or the path of a TOML file."""

Dtype = str | torch.dtype | None

_CONVERTS = (Level.O2, Level.O3)


@dataclass(frozen=True)
class Plan:
    """What `decorate` changes and why: one row for each tensor, and the settings of the rest.

    `print(plan)` shows a table of the rows, the memory before and after, and the settings.

    >>> import mezzo
    >>> model = torch.nn.Linear(4, 8)
    >>> print(mezzo.plan(model.eval(), None, "O3", dtype="bfloat16"))  # doctest: +ELLIPSIS
    O3 on cpu: bfloat16, ...
    <BLANKLINE>
    name    shape  dtype               why
    weight  8 × 4  float32 → bfloat16  no master: it is in no optimizer
    bias    8      float32 → bfloat16  no master: it is in no optimizer
    <BLANKLINE>
    2 of 2 tensors change: 160 bytes → 80 bytes (master='none')
    """

    policy: Policy
    """The policy, with the overrides that were passed."""
    device: str
    """The device type of the models."""
    dtype: torch.dtype | None
    """The 16-bit dtype; None if everything runs in float32."""
    dtype_reason: str
    """Why this dtype was chosen."""
    master: Master
    """The master format; `Master.NONE` if parameters stay float32 or there is no optimizer."""
    clip_norm: float | None
    """The maximum norm of the gradients of each optimizer; None if they are not clipped."""
    output_dtype: torch.dtype | None
    """The dtype that outputs of the models are cast to; None if they are not cast."""
    save_dtype: torch.dtype | None
    """The dtype of the weights in `model.state_dict()`; None is the dtype of the parameter."""
    seed: int
    """The seed of stochastic rounding."""
    rows: tuple[PlanRow, ...]
    """Every floating-point parameter and buffer, tied ones once."""
    faster_layers: tuple[str, ...] = ()
    """Descriptions of layers that get a form which is faster on a GPU, or takes less memory."""
    defer_to_autocast: bool = False
    """Whether an enabled autocast region around a call is used instead of the model's own."""
    sharded: bool = False
    """Whether parameters are sharded over processes, by FSDP2 or tensor parallelism."""

    @property
    def converts(self) -> bool:
        """Whether float32 tensors are cast to 16 bits: at O2 and O3, if a 16-bit dtype is used.

        The shards of a sharded model stay float32, unless a master format makes 16-bit ones
        smaller.
        """
        casts = not self.sharded or casts_shards(self.master)
        return self.dtype is not None and self.policy.level in _CONVERTS and casts

    @property
    def casts_only_parameters(self) -> bool:
        """Whether buffers and inputs keep their dtype: at O2, except with another system's preset.

        Ops then take the precisions of O1, and explicit float32 stays float32.
        """
        return casts_only_parameters(self.policy)

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters and buffers before."""
        return sum(row.numel * row.before.itemsize for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters and buffers after, without their companion tensors."""
        return sum(row.numel * row.after.itemsize for row in self.rows)

    @property
    def master_bytes(self) -> int:
        """Bytes of all companion tensors of master weights."""
        return sum(row.numel * _companion_size(row, self.master) for row in self.rows if row.master)

    @property
    def shard_bytes_saved(self) -> int:
        """Bytes that 16-bit shards, their gradients and masters save, over all processes.

        0 unless the shards are cast to 16 bits.
        """
        if not (self.sharded and self.converts):
            return 0
        # A gradient has the dtype of its shard; what has a master is trained.
        saved = sum(
            row.numel * (row.before.itemsize - row.after.itemsize) * (2 if row.master else 1)
            for row in self.rows
        )
        return saved - self.master_bytes

    def __str__(self) -> str:
        dtype = "float32" if self.dtype is None else dtype_name(self.dtype)
        head = f"{self.policy.level.value} on {self.device}: {dtype}, {self.dtype_reason}"
        return "\n".join([head, "", *format_rows(self.rows), "", self._total(), *self._settings()])

    def _total(self) -> str:
        converted = sum(row.before is not row.after for row in self.rows)
        masters = f" + {format_bytes(self.master_bytes)} of masters" if self.master_bytes else ""
        master = f" (master={self.master.value!r})" if converted else ""
        return (
            f"{converted} of {len(self.rows)} tensors change: {format_bytes(self.bytes_before)} →"
            f" {format_bytes(self.bytes_after)}{masters}{master}"
        )

    def _settings(self) -> list[str]:
        dtypes = {
            "gradients accumulate in": (
                self.policy.grad_dtype if self.converts and not self.sharded else None
            ),
            "outputs are cast to": self.output_dtype,
            "state_dict() returns weights in": self.save_dtype,
        }
        lines = [
            f"{what} {dtype_name(dtype)}" for what, dtype in dtypes.items() if dtype is not None
        ]
        if self.clip_norm is not None:
            lines.append(f"gradients are clipped to a norm of {self.clip_norm:g}")
        if self.shard_bytes_saved:
            lines.append(
                "16-bit shards, their gradients and masters take"
                f" {format_bytes(self.shard_bytes_saved)} less than float32 shards, over all"
                " processes"
            )
        if self.defer_to_autocast:
            lines.append("an autocast region around the model is used instead of its own policy")
        return [*lines, *self.faster_layers]


def input_dtype_of(plan: Plan) -> torch.dtype | None:
    """Return the dtype that models cast floating-point inputs to first; None if they do not."""
    return plan.dtype if plan.converts and not plan.casts_only_parameters else None


@dataclass(frozen=True, eq=False)
class DecoratePlan:
    """A plan together with the objects that it changes."""

    plan: Plan
    targets: Targets
    tensors: tuple[PlannedTensor, ...]
    """The tensors, in the order of `plan.rows`."""
    faster_layers: tuple[FasterLayer, ...]
    """The layers that get a faster forward."""
    norms: tuple[nn.Module, ...]
    """The normalisation layers that return the dtype of their input."""
    groups: tuple[GroupPrecision, ...] = ()
    """The groups of a sharded model, with their precision at O2."""


def plan(
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
) -> Plan:
    """Return what `decorate` would do with the same arguments, without changing anything.

    Raises the same errors as `decorate`.

    Args:
        model: The model, or a list of models.
        optimizer: The optimizer of these models, or a list of optimizers.
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file.
        clip_norm: Norm that gradients are clipped to, see `decorate`.
        output_dtype: Dtype that outputs are cast to, see `decorate`.
        save_dtype: Dtype of the weights in `state_dict()`, see `decorate`.
        seed: Seed of stochastic rounding.
        defer_to_autocast: Whether an enabled autocast region goes first, see `decorate`.
        **overrides: Fields of the policy to change, such as `dtype=`, `master=` or `keep_full=`.

    >>> import mezzo
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for row in mezzo.plan(model, optimizer, "O2", dtype="bfloat16").rows:
    ...     print(row.name, row.change, row.reason, sep=": ")
    0.weight: float32 → bfloat16: float32 master
    0.bias: float32 → bfloat16: float32 master
    1.weight: float32: LayerNorm is a normalisation layer
    1.bias: float32: LayerNorm is a normalisation layer
    """
    return make_plan(
        model,
        optimizer,
        policy,
        clip_norm=clip_norm,
        output_dtype=output_dtype,
        save_dtype=save_dtype,
        seed=seed,
        defer_to_autocast=defer_to_autocast,
        **overrides,
    ).plan


def make_plan(
    model: Models,
    optimizer: Optimizers | None,
    policy: PolicyArg,
    *,
    clip_norm: float | None,
    output_dtype: Dtype,
    save_dtype: Dtype,
    seed: int,
    defer_to_autocast: bool,
    **overrides: Any,
) -> DecoratePlan:
    """Plan a `decorate` call. All its errors are raised here, before anything changes."""
    targets = read_targets(model, optimizer)
    read_policy, keep_full = read_keep_full(policy, overrides, targets.models)
    resolved = resolve_dtype(read_policy, hardware(targets.device))
    half = resolved.dtype if read_policy.level in _CONVERTS else None
    _refuse_wrappers(targets, replaces_step=half is not None or clip_norm is not None)
    sharded = is_sharded_model(targets.models)
    groups = (
        plan_groups(targets.models, read_policy, half, keep_full, targets.optimizers)
        if sharded and half is not None
        else ()
    )
    norms = (
        find_norms(targets.models, read_policy)
        if half is not None and casts_only_parameters(read_policy)
        else ()
    )
    half = None if sharded and not casts_shards(read_policy.master) else half
    master = _master(read_policy, half, targets)
    rule = TensorRule(
        read_policy.level,
        half,
        _why_float32(read_policy, resolved, sharded=sharded),
        master,
        casts_buffers=not casts_only_parameters(read_policy),
    )
    tensors = _plan_tensors(list_tensors(targets, keep_full), rule, groups)
    faster = (
        ()
        if half is None or sharded
        else find_faster_layers(targets.models, read_policy, targets.device)
    )
    plan = Plan(
        policy=read_policy,
        device=targets.device,
        dtype=resolved.dtype,
        dtype_reason=resolved.reason,
        master=master,
        clip_norm=_clip_norm(clip_norm, targets),
        output_dtype=_output_dtype(output_dtype),
        save_dtype=_save_dtype(save_dtype, half, master, targets),
        seed=seed,
        rows=tuple(planned.row for planned in tensors),
        faster_layers=tuple(map(str, faster)),
        defer_to_autocast=defer_to_autocast,
        sharded=sharded,
    )
    return DecoratePlan(plan, targets, tensors, faster, norms, groups)


def _refuse_wrappers(targets: Targets, *, replaces_step: bool) -> None:
    """Raise for optimizers that step another one, if their step would be replaced."""
    for optimizer in targets.optimizers:
        if replaces_step or is_zero_redundancy(optimizer):
            refuse_wrapper(optimizer)


def _plan_tensors(
    tensors: Iterable[TensorInfo], rule: TensorRule, groups: Sequence[GroupPrecision]
) -> tuple[PlannedTensor, ...]:
    """Plan every tensor by the rule, or with the other shards of its group."""
    group_of = {id(shard): group for group in groups for shard in group.group.parameters}
    return tuple(_planned(rule, info, group_of.get(id(info.tensor))) for info in tensors)


def _planned(rule: TensorRule, info: TensorInfo, group: GroupPrecision | None) -> PlannedTensor:
    """Plan a tensor, which is in a group if the model is sharded."""
    if group is None or not group.casts_shards:
        return PlannedTensor(info, rule.row(info, None if group is None else group.reason))
    # All shards of a group have one dtype: norms among them are cast too, and have masters.
    row = rule.row(replace(info, keep_reason=""))
    return PlannedTensor(info, replace(row, reason=f"{row.reason}; {group.reason}"))


def _master(policy: Policy, half: torch.dtype | None, targets: Targets) -> Master:
    """Return the master format for a policy and a 16-bit dtype."""
    if half is None:
        return Master.NONE
    default = Master.FLOAT32 if policy.level is Level.O2 else Master.NONE
    master = default if policy.master is Master.AUTO else policy.master
    # Raises an error if the format does not support this dtype.
    MASTER_FORMATS[master].split(torch.zeros(1), half)
    return master if targets.optimizers else Master.NONE


def _why_float32(policy: Policy, resolved: ResolvedDtype, *, sharded: bool) -> str:
    if policy.level not in _CONVERTS:
        return f"parameters stay float32 at {policy.level.value}"
    if sharded and resolved.dtype is not None:
        return f"buffers stay float32 at {policy.level.value}"
    return f"stays float32: {resolved.reason}"


def _clip_norm(clip_norm: float | None, targets: Targets) -> float | None:
    if clip_norm is None:
        return None
    if not isinstance(clip_norm, int | float) or not clip_norm > 0 or not isfinite(clip_norm):
        raise PolicyError(
            f"clip_norm={clip_norm!r} should be a positive number such as 1.0, or None."
        )
    if not targets.optimizers:
        raise PolicyError(
            f"clip_norm={clip_norm!r} clips in the optimizer's step, and no optimizer was given."
            " Pass it: decorate(model, optimizer, clip_norm=...)."
        )
    return float(clip_norm)


def _output_dtype(argument: Dtype) -> torch.dtype | None:
    if argument is None:
        return None
    return parse_dtype(argument, allowed=(*HALF_DTYPES, torch.float32), what="output_dtype")


def _save_dtype(
    argument: Dtype, half: torch.dtype | None, master: Master, targets: Targets
) -> torch.dtype | None:
    if argument is None:
        return None
    dtype = parse_dtype(argument, allowed=(torch.float32,), what="save_dtype")
    if half is not None and not MASTER_FORMATS[master].exact:
        exact = " or ".join(
            repr(master_format.master.value)
            for master_format in MASTER_FORMATS.values()
            if master_format.exact
        )
        why = (
            f"master={master.value!r} has"
            if targets.optimizers
            else "without an optimizer there are"
        )
        raise PolicyError(
            f"save_dtype='float32' needs exact float32 weights, and {why} none. Use master={exact}"
            " with an optimizer, or leave save_dtype out."
        )
    return dtype


def _companion_size(row: PlanRow, master: Master) -> int:
    """Return the bytes of a companion per element."""
    master_format = MASTER_FORMATS[Master.FLOAT32 if row.kind == "buffer" else master]
    dtype = master_format.companion_dtype(row.after)
    return 0 if dtype is None else dtype.itemsize


# -- without values --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlannedTensors:
    """The tensors of a model as `decorate` would store them in one process."""

    half: torch.dtype | None
    """The dtype that parameters are cast to; None if they are not."""
    master: Master
    tensors: tuple[PlannedTensor, ...]


def plan_tensors(
    targets: Targets, policy: Policy, keep_full: KeepFull, dtype: torch.dtype | None
) -> PlannedTensors:
    """Plan the tensors of a model that need not have values, as on the meta device."""
    half = dtype if policy.level in _CONVERTS else None
    master = _master(policy, half, targets)
    casts_buffers = not casts_only_parameters(policy)
    rule = TensorRule(policy.level, half, "stays float32", master, casts_buffers=casts_buffers)
    infos = list_tensors(targets, keep_full)
    return PlannedTensors(
        half, master, tuple(PlannedTensor(info, rule.row(info)) for info in infos)
    )
