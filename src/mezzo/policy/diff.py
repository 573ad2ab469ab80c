"""What two policies say differently."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from mezzo._hardware import Hardware
from mezzo.policy.decide import all_entries
from mezzo.policy.resolve import choose

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


def diff(one: Policy, other: Policy, hardware: Hardware) -> PolicyDiff:
    """Compare two policies field by field, and op by op on a device."""
    said = [(field.name, one.say(field.name), other.say(field.name)) for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]
    rules, others = _rules(one, hardware), _rules(other, hardware)
    return PolicyDiff(tuple(said), tuple((name, rules[name], others[name]) for name in sorted(rules) if rules[name] != others[name]))


def _rules(policy: Policy, hardware: Hardware) -> dict[str, str]:
    dtype = choose(policy, hardware).dtype or policy.dtype or torch.float16
    return {name: entry.rule.value for name, entry in all_entries(policy, dtype, hardware.device).items()}
