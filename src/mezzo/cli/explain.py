"""`mezzo explain`: what a policy does with all ops, with one op, or with a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mezzo
from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._hardware import hardware
from mezzo.cli.factory import load_setup, sample_arguments, user_code
from mezzo.policy.decide import Decision, ResolvedDtype, resolve_dtype_quietly
from mezzo.policy.policy import Policy
from mezzo.prepare.kept_results import copy_with_results

if TYPE_CHECKING:
    from mezzo.observing.op_stats import OpStats

_SHOWN_OPS = 6


def parse_policy(text: str, dtype: str | None = None) -> Policy:
    """Make a policy of what a user passes: a level, a 16-bit dtype or a TOML file."""
    if text in map(dtype_name, HALF_DTYPES):
        text, dtype = "O1", dtype or text
    return Policy.parse(text, **({} if dtype is None else {"dtype": dtype}))


def split_arguments(policy: str | None, target: str | None) -> tuple[str | None, str | None]:
    """Return the policy and the target of `mezzo explain`, where a single one may be either.

    >>> split_arguments("softmax", None), split_arguments("O2", None)
    ((None, 'softmax'), ('O2', None))
    """
    if policy is None or target is not None or _is_policy(policy):
        return policy, target
    return None, policy


def _is_policy(text: str) -> bool:
    dtypes = {dtype_name(dtype) for dtype in HALF_DTYPES}
    # A level that does not exist is an unknown level, no unknown op.
    is_level = re.fullmatch(r"[oO0]\w", text) is not None
    return is_level or text in dtypes or Path(text).suffix == ".toml"


# -- a policy --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicySummary:
    """A policy on a device: its dtype, and its ops by rule."""

    policy: Policy
    device: str
    resolved: ResolvedDtype
    ops: Mapping[str, Sequence[str]]
    """Names of the ops by rule."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "policy": self.policy.to_dict(),
            "device": self.device,
            "dtype": _name(self.resolved.dtype),
            "reason": self.resolved.reason,
            "ops": {rule: list(names) for rule, names in self.ops.items()},
        }

    def __str__(self) -> str:
        dtype = _name(self.resolved.dtype)
        lines = [
            repr(self.policy),
            f"{self.policy.level.value} on {self.device}: {dtype}, {self.resolved.reason}",
            "",
        ]
        for rule, names in self.ops.items():
            shown = ", ".join(names[:_SHOWN_OPS]) + (", …" if len(names) > _SHOWN_OPS else "")
            lines.append(f"{rule:14} {len(names):4} ops: {shown}")
        lines += [
            "",
            "One op: mezzo explain O1 softmax; a model: mezzo explain O2 train:make_model",
        ]
        return "\n".join(lines)


def explain_policy(policy: Policy, device: str | None) -> PolicySummary:
    """Return the dtype of a policy on a device, and its ops by rule."""
    facts = hardware(device)
    ops: dict[str, list[str]] = {}
    for op in mezzo.ops(policy, device=device):
        ops.setdefault(op.rule, []).append(op.name)
    by_number = dict(sorted(ops.items(), key=lambda item: len(item[1])))
    return PolicySummary(policy, facts.device, resolve_dtype_quietly(policy, facts), by_number)


def decision_data(decision: Decision) -> dict[str, Any]:
    """Return the decision on an op as plain values."""
    return {
        "op": decision.op,
        "rule": decision.rule.value,
        "dtype": None if decision.dtype is None else dtype_name(decision.dtype),
        "reason": decision.reason,
    }


def conditions_note(device: str | None, inputs: Sequence[str]) -> str:
    """Return the inputs and the device that an op was explained for, and how to pass others."""
    facts = hardware(device)
    what = "on" if inputs else "for float32 inputs on"
    if facts.absent is not None:
        return f"That is {what} {facts.device}, which this machine does not have: {facts.absent}."
    hint = "" if inputs else " Pass --input bfloat16 for 16-bit ones."
    if device is None and facts.device == "cpu":
        hint += " Pass --device cuda for a GPU."
    return f"That is {what} {facts.device}, {facts.name}.{hint}"


def _name(dtype: torch.dtype | None) -> str:
    return "float32" if dtype is None else dtype_name(dtype)


# -- a model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSummary:
    """A model under a policy: its tensors, and the ops of a forward pass."""

    plan: mezzo.Plan
    ops: OpStats | None
    """The ops of a forward pass; None if the factory returns no sample."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        rows = [
            {
                "name": row.name,
                "shape": list(row.shape),
                "before": dtype_name(row.before),
                "after": dtype_name(row.after),
                "reason": row.reason,
            }
            for row in self.plan.rows
        ]
        return {
            "policy": self.plan.policy.to_dict(),
            "device": self.plan.device,
            "dtype": _name(self.plan.dtype),
            "reason": self.plan.dtype_reason,
            "bytes_before": self.plan.bytes_before,
            "bytes_after": self.plan.bytes_after,
            "master_bytes": self.plan.master_bytes,
            "tensors": rows,
            "ops": None if self.ops is None else [asdict(row) for row in self.ops.rows],
        }

    def __str__(self) -> str:
        return str(self.plan) if self.ops is None else f"{self.plan}\n\n{self.ops}"


def explain_model(factory: str, policy: Policy) -> ModelSummary:
    """Plan the model of a factory under a policy, and run its sample on a copy."""
    setup = load_setup(factory)
    plan = mezzo.plan(setup["model"], setup.get("optimizer"), policy)
    arguments = sample_arguments(setup)
    if arguments is None:
        return ModelSummary(plan, None)
    with user_code(factory):
        model = copy_with_results(setup["model"]).eval()
        mezzo.decorate(model, policy=policy)
        with mezzo.op_stats(model) as ops, torch.no_grad():
            model(*arguments[0], **arguments[1])
    return ModelSummary(plan, ops)
