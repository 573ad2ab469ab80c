"""`mezzo.plan`: what `decorate` would do to a model and its optimizer, as a value to read first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name, parse_dtype
from mezzo._errors import PolicyError
from mezzo._hardware import hardware
from mezzo.optim.attach import refuse_wrapper
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.policy.decide import Resolved, resolve
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Master
from mezzo.prepare import arguments, forward
from mezzo.prepare import arguments as words
from mezzo.prepare.arguments import Models, Optimizers, Targets
from mezzo.prepare.forward import PaddedLinear
from mezzo.prepare.plan_rows import PlannedTensor, PlanRow, TensorRule, plan_tensors, size, table

PolicyArg = Policy | str | os.PathLike[str] | Level | None
"""What every entry point takes for a policy: a level, a `Policy`, a TOML file."""

Dtype = str | torch.dtype | None

_CONVERTS = (Level.O2, Level.O3)


@dataclass(frozen=True)
class Plan:
    """What becomes of every parameter and buffer, and why; `print` shows it as a table."""

    policy: Policy
    device: str
    """The device type that the models live on."""
    dtype: torch.dtype | None
    """The 16-bit dtype; None runs everything in float32."""
    dtype_reason: str
    """Why that one."""
    master: Master
    """Where exact weights live; none where parameters stay float32 or no optimizer was given."""
    clip_norm: float | None
    """The largest norm of all gradients of an optimizer."""
    output_dtype: torch.dtype | None
    """What the models' outputs are cast to; None leaves them."""
    save_dtype: torch.dtype | None
    """The dtype of the weights that `state_dict` gives; None is the parameter's own."""
    seed: int
    """Where rounding at random starts."""
    rows: tuple[PlanRow, ...]
    """Every floating-point parameter and buffer, tied ones once."""
    padded_layers: tuple[str, ...] = ()
    """Linear layers that compute more outputs than they give, in words."""
    defer_to_autocast: bool = False
    """Whether an enclosing region that is on goes before the model's own."""

    @property
    def converts(self) -> bool:
        """Whether float32 tensors become 16-bit: at O2 and O3, where the device computes in such a dtype."""
        return self.dtype is not None and self.policy.level in _CONVERTS

    @property
    def bytes_before(self) -> int:
        """What parameters and buffers take before."""
        return sum(row.numel * row.before.itemsize for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """What parameters and buffers take after, without what lies beside them."""
        return sum(row.numel * row.after.itemsize for row in self.rows)

    @property
    def master_bytes(self) -> int:
        """What lies beside them."""
        return sum(row.numel * _beside_size(row, self.master) for row in self.rows if row.master)

    def __str__(self) -> str:
        chosen = "float32" if self.dtype is None else dtype_name(self.dtype)
        head = f"{self.policy.level.value} on {self.device}: {chosen}, {self.dtype_reason}"
        return "\n".join([head, "", *table(self.rows), "", self._total(), *self._words()])

    def _total(self) -> str:
        converted = sum(row.before is not row.after for row in self.rows)
        beside = f" + {size(self.master_bytes)} beside them" if self.master_bytes else ""
        master = f" (master={self.master.value!r})" if converted else ""
        return (
            f"{converted} of {len(self.rows)} tensors change: {size(self.bytes_before)} →"
            f" {size(self.bytes_after)}{beside}{master}"
        )

    def _words(self) -> list[str]:
        """What else was asked for."""
        said = {
            "gradients accumulate in": self.policy.grad_dtype if self.converts else None,
            "outputs are cast to": self.output_dtype,
            "state_dict() gives weights in": self.save_dtype,
        }
        lines = [f"{what} {dtype_name(dtype)}" for what, dtype in said.items() if dtype is not None]
        said_so = (
            [f"gradients are clipped to a norm of {self.clip_norm:g}"]
            if self.clip_norm is not None
            else []
        )
        said_so += (
            ["an autocast region around the model goes before its own policy"]
            if self.defer_to_autocast
            else []
        )
        return [*lines, *said_so, *self.padded_layers]


@dataclass(frozen=True, eq=False)
class DecoratePlan:
    """A plan together with what it speaks of."""

    plan: Plan
    targets: Targets
    tensors: tuple[PlannedTensor, ...]
    padded: tuple[PaddedLinear, ...]
    """Linear layers that compute more outputs than they give."""


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
    """Say what `decorate` would do with the same arguments; nothing is changed.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for row in plan(model, optimizer, "O2", dtype="bfloat16").rows:
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
    """Plan, and keep hold of the tensors that the plan speaks of. Every refusal is raised here, before anything changes."""
    given = words.read_targets(model, optimizer)
    read, kept = arguments.read_keep_full(policy, overrides, given.models)
    resolved = resolve(read, hardware(given.device))
    half = resolved.dtype if read.level in _CONVERTS else None
    if half is not None or clip_norm is not None:
        # Else the optimizer's step is left alone.
        for one in given.optimizers:
            refuse_wrapper(one)
    master = _master(read, half, given)
    verdict = TensorRule(read.level, half, _why_not(read, resolved), master)
    tensors = tuple(PlannedTensor(found, verdict.row(found)) for found in plan_tensors(given, kept))
    aligned = () if half is None else forward.find_paddable(given.models, given.device)
    made = Plan(
        policy=read,
        device=given.device,
        dtype=resolved.dtype,
        dtype_reason=resolved.reason,
        master=master,
        clip_norm=_clip_norm(clip_norm, given),
        output_dtype=(
            None
            if output_dtype is None
            else parse_dtype(
                output_dtype, allowed=(*HALF_DTYPES, torch.float32), what="output_dtype"
            )
        ),
        save_dtype=_save_dtype(save_dtype, half, master, given),
        seed=seed,
        rows=tuple(planned.row for planned in tensors),
        padded_layers=tuple(map(str, aligned)),
        defer_to_autocast=defer_to_autocast,
    )
    return DecoratePlan(made, given, tensors, aligned)


def _master(policy: Policy, half: torch.dtype | None, given: Targets) -> Master:
    """The master that the policy comes to."""
    if half is None:
        return Master.NONE
    default = Master.FLOAT32 if policy.level is Level.O2 else Master.NONE
    master = default if policy.master is Master.AUTO else policy.master
    # Asked of one number: what cannot be kept beside this dtype is refused before anything changes.
    MASTER_FORMATS[master].split(torch.zeros(1), half)
    return master if given.optimizers else Master.NONE


def _why_not(policy: Policy, resolved: Resolved) -> str:
    return (
        f"parameters stay float32 at {policy.level.value}"
        if policy.level not in _CONVERTS
        else f"stays float32: {resolved.reason}"
    )


def _clip_norm(clip_norm: float | None, given: Targets) -> float | None:
    if clip_norm is None:
        return None
    if not isinstance(clip_norm, int | float) or not clip_norm > 0 or not isfinite(clip_norm):
        raise PolicyError(
            f"clip_norm={clip_norm!r} should be a positive number such as 1.0, or None."
        )
    if not given.optimizers:
        raise PolicyError(
            f"clip_norm={clip_norm!r} clips in the optimizer's step, and no optimizer was given."
            " Pass it: decorate(model, optimizer, clip_norm=...)."
        )
    return float(clip_norm)


def _save_dtype(
    word: Dtype, half: torch.dtype | None, master: Master, given: Targets
) -> torch.dtype | None:
    if word is None:
        return None
    dtype = parse_dtype(word, allowed=(torch.float32,), what="save_dtype")
    if half is not None and not MASTER_FORMATS[master].exact:
        exact = " or ".join(
            repr(kind.master.value) for kind in MASTER_FORMATS.values() if kind.exact
        )
        why = (
            f"master={master.value!r} has" if given.optimizers else "without an optimizer there are"
        )
        raise PolicyError(
            f"save_dtype='float32' needs exact float32 weights, and {why} none. Use master={exact}"
            " with an optimizer, or leave save_dtype out."
        )
    return dtype


def _beside_size(row: PlanRow, master: Master) -> int:
    kind = MASTER_FORMATS[Master.FLOAT32 if row.kind == "buffer" else master]
    dtype = kind.companion_dtype(row.after)
    return 0 if dtype is None else dtype.itemsize
