"""What two policies say differently."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from mezzo.policy.decide import effective, entry_of
from mezzo.policy.registry import registry

if TYPE_CHECKING:
    from mezzo.policy.policy import Policy


@dataclass(frozen=True)
class PolicyDiff:
    """The differences of two policies; false when there are none."""

    fields: tuple[tuple[str, Any, Any], ...]
    """Field, what the one says, what the other says, in plain words."""
    ops: tuple[tuple[str, str, str], ...]
    """Op, its rule in the one, its rule in the other."""

    def __bool__(self) -> bool:
        return bool(self.fields or self.ops)

    def __str__(self) -> str:
        said = [f"{name}: {one} → {other}" for name, one, other in self.fields]
        ruled = [f"op {name}: {one} → {other}" for name, one, other in self.ops]
        return "\n".join(said + ruled) or "no difference"


def diff(one: Policy, other: Policy, device: str) -> PolicyDiff:
    """Compare two policies field by field, and op by op on a device."""
    said = [(field.name, one.say(field.name), other.say(field.name)) for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]
    rules, others = _rules(one, device), _rules(other, device)
    return PolicyDiff(tuple(said), tuple((name, rules[name], others[name]) for name in sorted(rules) if rules[name] != others[name]))


def _rules(policy: Policy, device: str) -> dict[str, str]:
    dtype = policy.dtype or torch.float16
    lists = effective(policy, dtype, device)
    return {op.name: entry_of(lists, op.name, dtype, device).rule.value for op in registry()}
