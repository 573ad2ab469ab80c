"""`mezzo.find_precision_loss`: the first op of a step that loses precision, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError
from mezzo.advising.shadow_run import Finding, Place, shadowed
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import enter_regions
from mezzo.policy.policy import Policy
from mezzo.policy.registry import registry
from mezzo.policy.types import Rule
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg

_ATTEMPTS = 12
"""Policies that are tried before the search for a remedy ends."""
_LARGEST_SCALE = 65536.0
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

    Needs several times the time and memory of a step, and synchronizes. Compiled code is not seen.

    Args:
        model: The model, not decorated. It is not changed.
        loss_fn: A function of the model's output and the target.
        x: The input; a tuple or dict is unpacked into the model, as in `TrainStep`.
        y: The target; a tuple is unpacked into the loss function.
        policy: A level such as `"O1"`, a `mezzo.Policy`, or the path of a TOML file.
        **overrides: Fields of the policy to change, such as `dtype=`.

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
    step = _Step(model, loss_fn, x, y)
    finding = step.run(chosen)
    if finding is None:
        return None
    cured = _search_remedy(step, chosen, finding)
    return PrecisionLoss(
        finding.place.op,
        finding.place.module,
        finding.place.source,
        _reason(finding),
        finding.backward,
        cured,
        "" if cured is None else _entry(chosen, cured),
    )


@dataclass(frozen=True)
class _Step:
    model: nn.Module
    loss_fn: Callable[..., Tensor]
    x: Any
    y: Any

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    def run(self, policy: Policy) -> Finding | None:
        """Run one step under a policy; return the first op that loses precision."""
        model, device = deepcopy(self.model), self.device
        # Without an optimizer there are no updates to lose.
        applied = replace(policy, master="none")
        decorate(model, None, applied)
        region = region_for(applied, device.type)
        devices = [device] if device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            # The region first: the mode that tracks functions must see calls before their casts.
            with enter_regions(region), shadowed(model, self._loss.__code__) as mode:
                loss = self._loss(model)
            parameters = [one for one in model.parameters() if one.requires_grad]
            if mode.finding is None and parameters and loss.requires_grad:
                scaled = loss * _finite_scale(loss, parameters, region.computes_in)
                with mode:
                    _gradients(scaled, parameters)
        return mode.finding

    def _loss(self, model: nn.Module) -> Tensor:
        x, y = self.x, self.y
        if isinstance(x, dict):
            outputs = model(**x)
        else:
            outputs = model(*x) if isinstance(x, tuple) else model(x)
        return self.loss_fn(outputs, *y) if isinstance(y, tuple) else self.loss_fn(outputs, y)


def _finite_scale(loss: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Return the largest loss scale with finite gradients, as scalers find it; 1 if none has."""
    scale = _LARGEST_SCALE if dtype is torch.float16 else 1.0
    while scale > 1.0:
        gradients = _gradients(loss * scale, parameters)
        if all(bool(one.isfinite().all()) for one in gradients if one is not None):
            return scale
        scale /= 4.0
    return 1.0


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)


# -- remedy ----------------------------------------------------------------------------------------


def _search_remedy(step: _Step, policy: Policy, finding: Finding | None) -> Policy | None:
    """Run what loses precision in float32, and what that shows next, until nothing does."""
    start, current = policy, finding
    for _ in range(_ATTEMPTS):
        # Without a rounding to 16 bits on its way, the op fails in float32 too.
        if current is None or not current.causes:
            return policy if policy != start else None
        places = {current.place} if current.nonfinite else current.causes
        extended = _in_float32(policy, places, step.device.type)
        if extended == policy:
            return None
        policy = extended
        current = step.run(policy)
    return None


def _in_float32(policy: Policy, places: Iterable[Place], device: str) -> Policy:
    """Return a policy that runs these ops in float32.

    Products come last, because they are what 16 bits make fast, and by module if they have one.
    """
    known = [place for place in places if place.op in registry()]
    rule = {place.op: policy.explain(place.op, device=device).rule for place in known}
    products = {place for place in known if rule[place.op] is Rule.HALF}
    chosen = [place for place in known if place not in products] or products
    ops = {place.op for place in chosen if place not in products or not place.module}
    rules: dict[str | type, str | Rule] = {selector.text: rule for selector, rule in policy.modules}
    rules |= {place.module: Rule.FULL for place in chosen if place.op not in ops}
    others = ("half", "promote", "keep", "refuse", "float32_inside")
    return replace(
        policy,
        full=policy.full | ops,
        modules=rules,
        **{name: getattr(policy, name) - ops for name in others},
    )


def _entry(before: Policy, after: Policy) -> str:
    """Return the fields that differ, as keyword arguments."""
    old, new = before.to_dict(), after.to_dict()
    changed = [name for name, value in new.items() if old.get(name) != value]
    changed += [name for name in old if name not in new]
    return repr(
        Policy(
            after.level,
            **{name: getattr(after, name) for name in changed if name != "level"},
        )
    ).partition(", ")[2][:-1]


def _reason(finding: Finding) -> str:
    dtype = dtype_name(finding.dtype)
    if finding.nonfinite:
        return f"left the range of {dtype}: {finding.largest:.1e}"
    rounded = sorted({place.op for place in finding.causes})
    inputs = f", because {', '.join(rounded)} rounded to 16 bits" if rounded else ""
    return f"lost its digits: the relative error is {finding.error:.2g}{inputs}"
