"""Search the policy with which no op of a batch loses precision, by running the batch with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mezzo._dtypes import dtype_name
from mezzo._errors import MezzoError
from mezzo.observing.finding import Finding, Kind
from mezzo.observing.function_places import Place
from mezzo.observing.replay import Replay
from mezzo.policy.policy import Policy
from mezzo.policy.registry import registry
from mezzo.policy.types import Rule

_ATTEMPTS = 12
"""Policies that are tried before the search for a cure ends."""


@dataclass(frozen=True)
class Cure:
    """A policy against a finding."""

    policy: Policy
    entry: str
    """What this policy adds, as arguments: `full={'mul'}`."""
    verified: bool
    """Whether the batch was run with it, and no op lost precision."""


def find_cure(replay: Replay, finding: Finding) -> Cure | None:
    """Run the op that loses precision in float32, then the next one that does, until none is left.

    If that does not end, try bfloat16 in place of float16. The first policy that was tried is
    returned unverified if nothing helps; None if no policy changes the op.
    """
    start = policy = replay.policy
    if replay.scale is not None and replay.scale > 1.0:
        # As a dynamic scaler does after a skip.
        replay = replace(replay, scale=None)
    current: Finding | None = finding
    tried: Policy | None = None
    for _ in range(_ATTEMPTS):
        if current is None:
            return Cure(policy, entry(start, policy), verified=True)
        extended = _extended(policy, current, replay)
        if extended is None:
            break
        policy = extended
        tried = tried or policy
        try:
            current = replay.run(policy).finding
        except (MezzoError, RuntimeError):
            # Not every op can run in float32 with 16-bit weights.
            break
    wider = _in_bfloat16(replay, finding)
    if wider is not None:
        return Cure(wider, entry(start, wider), verified=True)
    return None if tried is None else Cure(tried, entry(start, tried), verified=False)


def _extended(policy: Policy, finding: Finding, replay: Replay) -> Policy | None:
    # Without a rounding to 16 bits on its way, the op fails in float32 too.
    if not finding.causes and finding.kind is not Kind.NONFINITE:
        return None
    # If float32 for the op alone is not enough, its inputs must not be rounded either.
    for places in [{finding.place}, finding.causes] if finding.nonfinite else [finding.causes]:
        extended = _in_float32(policy, places, replay)
        if extended != policy:
            return extended
    return None


def _in_bfloat16(replay: Replay, finding: Finding) -> Policy | None:
    if finding.dtype is not torch.float16:
        return None
    policy = replace(replay.policy, dtype="bfloat16")
    try:
        return policy if replay.run(policy, scale=1.0).finding is None else None
    except (MezzoError, RuntimeError):
        return None


def _in_float32(policy: Policy, places: Iterable[Place], replay: Replay) -> Policy:
    """Return a policy that runs these ops in float32.

    Products come last, because they are what 16 bits make fast, and by module if they have one.
    """
    known = [place for place in places if place.op in registry()]
    device = replay.device.type
    rule = {place.op: policy.explain(place.op, device=device).rule for place in known}
    products = {place for place in known if rule[place.op] is Rule.HALF}
    chosen = [place for place in known if place not in products] or products
    by_module = len(replay.models) == 1
    ops = {
        place.op for place in chosen if place not in products or not (place.module and by_module)
    }
    rules: dict[str | type, str | Rule] = {selector.text: rule for selector, rule in policy.modules}
    rules |= {place.module: Rule.FULL for place in chosen if place.op not in ops}
    others = ("half", "promote", "keep", "refuse", "float32_inside")
    return replace(
        policy,
        full=policy.full | ops,
        modules=rules,
        **{name: getattr(policy, name) - ops for name in others},
    )


def entry(before: Policy, after: Policy) -> str:
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


def reason_of(finding: Finding) -> str:
    """Return what happened to the result of an op, as the end of a sentence."""
    dtype = dtype_name(finding.dtype)
    rounded = {place.op for place in finding.causes}
    if finding.kind is Kind.OVERFLOW:
        rounded -= {finding.place.op}
    because = f", because {', '.join(sorted(rounded))} rounded to 16 bits" if rounded else ""
    match finding.kind:
        case Kind.OVERFLOW if finding.is_nan:
            return f"is NaN in {dtype}, where the exact result is finite{because}"
        case Kind.OVERFLOW if finding.largest < torch.finfo(finding.dtype).max:
            return (
                f"is infinite in {dtype}, where the exact result is {finding.largest:.1e}{because}"
            )
        case Kind.OVERFLOW:
            return f"left the range of {dtype}: {finding.largest:.1e}"
        case Kind.UNDERFLOW:
            return f"underflowed to zero in {dtype}: the largest value is {finding.largest:.1e}"
        case Kind.DIGITS:
            return f"lost its digits: the relative error is {finding.error:.2g}{because}"
    return f"made {'NaN' if finding.is_nan else 'an infinity'}"
