"""`mezzo.find_precision_loss`: the first op of a step that loses precision, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mezzo._errors import PolicyError
from mezzo.observing.cures import find_cure, reason_of
from mezzo.observing.replay import replay_of
from mezzo.policy.policy import Policy
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg

_NO_TARGET: Any = ()


@dataclass(frozen=True)
class PrecisionLoss:
    """The first op of a step that lost precision, and the policy that avoids it; print it."""

    op: str
    """The op, as policies name it."""
    module: str
    """The path of the module that called it; empty for the model itself and for the loss."""
    source: str
    """The file and line of the code that called it, if it is not torch's."""
    reason: str
    """What happened to the result."""
    backward: bool
    """Whether the gradient of the op lost precision, not its result."""
    policy: Policy | None
    """A policy with which no op of the step loses precision; None if none was found."""
    entry: str
    """What this policy adds, as an argument: `full={'mul'}`; empty if none was found."""

    def __str__(self) -> str:
        name = f"The gradient of {self.op}" if self.backward else self.op
        where = " ".join(
            part for part in (self.source, f"in {self.module}" if self.module else "") if part
        )
        remedy = (
            f"Pass {self.entry}: then no op of this step loses precision."
            if self.policy is not None
            else "No policy was found that avoids this: change the computation."
        )
        return f"{name} {self.reason}{f' ({where})' if where else ''}. {remedy}"


def find_precision_loss(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    x: Any,
    y: Any = _NO_TARGET,
    policy: PolicyArg = "O1",
    **overrides: Any,
) -> PrecisionLoss | None:
    """Find the first op of a training step that overflows or loses its digits; None if none does.

    Runs forward, `loss_fn` and backward on one batch under a policy, on a copy of the model, and
    compares each op with a float64 computation that never rounds to 16 bits. A result lost its
    digits if its relative error is above 25 % and far above that of its inputs, as after a
    subtraction of nearly equal numbers. Then it searches a policy with which no op does so.

    Needs several times the time and memory of a step, and synchronizes. `mezzo.trace_overflow`
    takes steps and decorated models too, and reports faults of data and parameters.

    Args:
        model: The model, not decorated. It is not changed.
        loss_fn: A function of the model's output and the target.
        x: The input; a tuple or dict is unpacked into the model, as in `TrainStep`.
        y: The target; a tuple is unpacked into the loss function.
        policy: A level such as `"O1"`, a `mezzo.Policy`, or the path of a TOML file.
        **overrides: Fields of the policy to change, such as `dtype=`.

    >>> import torch
    >>> class Variance(nn.Module):
    ...     def forward(self, x):
    ...         return (x * x).mean(0) - x.mean(0) ** 2
    >>> model = nn.Sequential(nn.Linear(4, 4), Variance())
    >>> _ = nn.init.constant_(model[0].bias, 1000.0)
    >>> x = torch.linspace(0.0, 1.0, 32).view(8, 4)
    >>> found = find_precision_loss(model, torch.sum, x, dtype="float16")
    >>> found.op, found.module, found.reason
    ('mul', '1', 'left the range of float16: 1.0e+06')
    """
    chosen = Policy.parse(policy, **overrides)
    if any(decoration_of(module) is not None for module in model.modules()):
        raise PolicyError(
            "The model is decorated. Call mezzo.undecorate(model) first: the policy is applied to"
            " a copy of the plain model."
        )
    replay = replay_of(model, (x, y) if y is not _NO_TARGET else (x,), loss_fn, chosen)
    finding = replay.run(chosen).finding
    if finding is None:
        return None
    cure = find_cure(replay, finding) if finding.causes else None
    cured = cure if cure is not None and cure.verified else None
    return PrecisionLoss(
        finding.place.op,
        finding.place.module,
        finding.place.source,
        reason_of(finding),
        finding.backward,
        None if cured is None else cured.policy,
        "" if cured is None else cured.entry,
    )
