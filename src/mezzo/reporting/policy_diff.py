"""The policy that findings suggest, as a difference to the policy of the run."""

from __future__ import annotations

from dataclasses import dataclass

from mezzo._errors import MezzoError
from mezzo.observing.log_values import Line
from mezzo.observing.skip_causes import describe_finding, failed_cure
from mezzo.policy.policy import Policy
from mezzo.reporting.run_data import RunData


@dataclass(frozen=True)
class PolicyChange:
    """A change of the policy that a finding of `trace_overflow` suggests."""

    reason: str
    """The finding in a sentence."""
    before: str | None
    """The policy of the run; None if the change is not one of the policy."""
    after: str
    verified: bool
    """Whether the batch was run with it and did not fail."""


def policy_changes(run: RunData) -> list[PolicyChange]:
    """Return the changes that the findings of a log suggest; each once."""
    found: dict[str, PolicyChange] = {}
    for line in run.of("finding"):
        cure = line.get("cure")
        if isinstance(cure, str) and cure and not failed_cure(line):
            found.setdefault(cure, _change(run, line, cure))
    return list(found.values())


def _change(run: RunData, line: Line, cure: str) -> PolicyChange:
    reason, verified = f"{describe_finding(line)}.", line.get("verified") is True
    if cure.startswith("scaler="):
        return PolicyChange(reason, None, cure, verified)
    policy = run.policy or "O1"
    # A log has the level, or the whole policy.
    dtype = f", dtype={run.dtype!r}" if run.dtype and "dtype=" not in cure else ""
    before = policy if policy.endswith(")") else f"Policy({policy!r}{dtype})"
    after = _whole_policy(line) or f"{before[:-1]}, {cure})".replace("(, ", "(")
    return PolicyChange(reason, before, after, verified)


def _whole_policy(finding: Line) -> str | None:
    """Return the policy with the cure, which has the rules of the run too; None without one."""
    fields = finding.get("policy")
    try:
        return repr(Policy(**fields)) if isinstance(fields, dict) else None
    except (MezzoError, TypeError):
        return None
