"""Decide the rule, the dtype and the reason for an op on a device; resolve `dtype="auto"`; compare two policies."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import torch

from mezzo import _events
from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._hardware import Hardware
from mezzo.policy.missing_kernels import lacks_kernel
from mezzo.policy.parse import check_argument
from mezzo.policy.presets import preset_lists
from mezzo.policy.registry import registry
from mezzo.policy.types import Entry, Level, OnUnsupported, OpLists, Rule

if TYPE_CHECKING:
    from mezzo.policy.policy import Policy

_USER = {
    Rule.HALF: "listed half by the user",
    Rule.FULL: "listed full by the user",
    Rule.PROMOTE: "listed promote by the user",
    Rule.KEEP: "listed keep by the user",
    Rule.REFUSE: "listed refuse by the user",
}


@dataclass(frozen=True)
class Decision:
    """The precision an op runs in, and the reason."""

    op: str
    rule: Rule
    dtype: torch.dtype | None
    """What it computes in; None when the op is refused."""
    reason: str

    def __str__(self) -> str:
        ran = f"runs in {dtype_name(self.dtype)}" if self.dtype is not None else "is refused"
        return f"{self.op} {ran}: {self.reason}."


def effective_lists(policy: Policy, dtype: torch.dtype, device: str) -> OpLists:
    """The policy's preset with the policy's own words on top, for a 16-bit dtype on a device."""
    return _effective(policy, dtype, device, registry().generation)


@lru_cache(maxsize=64)
def _effective(policy: Policy, dtype: torch.dtype, device: str, _generation: int) -> OpLists:
    base = preset_lists(policy.preset, policy.level, dtype, device)
    entries = {op.name: op.entry for op in registry() if op.entry is not None} | dict(base.entries)
    entries |= {
        name: Entry(rule, _USER[rule]) for rule in Rule for name in policy.ops_with_rule(rule)
    }
    entries |= _composed_of(policy, entries)
    entries = {name: _with_kernel(name, entry, dtype, device) for name, entry in entries.items()}
    default_rule = (
        base.default_rule
        if policy.default_rule is None
        else Entry(
            policy.default_rule,
            f"in no list: the policy says {policy.default_rule.value} for those",
        )
    )
    halves = base.refused_in_half - policy.ops_with_rule(Rule.REFUSE)
    return OpLists(
        entries,
        default_rule,
        dict(base.exempt_args) | dict(policy.exempt_args),
        base.conditional + policy.conditional,
        halves,
    )


def _with_kernel(name: str, entry: Entry, dtype: torch.dtype, device: str) -> Entry:
    if entry.rule not in (Rule.FULL, Rule.REFUSE) and lacks_kernel(name, dtype, device):
        return Entry(
            Rule.FULL, f"{entry.reason}, but it has no {dtype_name(dtype)} kernel on {device}"
        )
    return entry


COMPOSED_OF: Mapping[str, tuple[str, ...]] = {
    "einsum": ("bmm",),
    "tensordot": ("mm",),
    "chain_matmul": ("mm",),
    "linalg_multi_dot": ("mm",),
    "inner": ("matmul",),
    "lstm": ("linear",),
    "gru": ("linear",),
    "rnn_tanh": ("linear",),
    "rnn_relu": ("linear",),
    "lstm_cell": ("linear",),
    "gru_cell": ("linear",),
    "rnn_tanh_cell": ("linear",),
    "rnn_relu_cell": ("linear",),
}
"""Ops that C++ makes of others, where no mode sees them: in no list themselves, they follow what
the user says of their parts."""


def _composed_of(policy: Policy, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    listed = {
        name: rule
        for rule in (Rule.HALF, Rule.FULL, Rule.KEEP)
        for name in policy.ops_with_rule(rule)
    }
    following = {
        whole: part
        for whole, parts in COMPOSED_OF.items()
        if whole not in entries
        for part in parts
        if part in listed
    }
    return {
        whole: Entry(listed[part], f"computed by {part}, which is {_USER[listed[part]]}")
        for whole, part in following.items()
    }


def entry_of(lists: OpLists, name: str, dtype: torch.dtype, device: str) -> Entry:
    """The entry of an op, listed or not."""
    return lists.entries.get(name) or _with_kernel(name, lists.default_rule, dtype, device)


def all_entries(policy: Policy, dtype: torch.dtype, device: str) -> dict[str, Entry]:
    """The entry of every known op, in order of their names."""
    names = sorted(registry().names)
    if policy.level is Level.O0:
        # Whatever else the policy says, and whichever kernels are missing.
        return dict.fromkeys(
            names, preset_lists(policy.preset, policy.level, dtype, device).default_rule
        )
    lists = effective_lists(policy, dtype, device)
    return {name: entry_of(lists, name, dtype, device) for name in names}


def explain(
    policy: Policy,
    op: str,
    inputs: Iterable[torch.dtype | str],
    *,
    dtype: torch.dtype,
    device: str,
    arguments: Mapping[str, Any] | None = None,
) -> Decision:
    """Decide one call: the rule, the dtype it computes in and why, as eager and graph both carry it out."""
    said = list(inputs)
    name, given = registry().parse(op), _read_inputs(said)
    for word in arguments or ():
        check_argument(name, word)
    lists = effective_lists(policy, dtype, device)
    entry = entry_of(lists, name, dtype, device)
    for condition in lists.conditional:
        if (
            condition.op == name
            and arguments
            and condition.argument in arguments
            and arguments[condition.argument] in condition.values
        ):
            entry = Entry(
                Rule.FULL,
                f"{condition.argument}={arguments[condition.argument]!r}: {condition.reason}",
            )
    if (
        entry.rule is Rule.REFUSE
        and name in lists.refused_in_half
        and said
        and not any(one in HALF_DTYPES for one in given)
    ):
        entry = Entry(Rule.KEEP, "refused with 16-bit inputs alone")
    untouched = [one for one in given if one not in CASTABLE_DTYPES]
    reason = (
        f"{dtype_name(untouched[0])} inputs are never cast"
        if untouched and entry.rule in (Rule.HALF, Rule.FULL)
        else entry.reason
    )
    return Decision(name, entry.rule, _computed_in(entry.rule, given, dtype), reason)


def uncast_decision(op: str, inputs: Iterable[torch.dtype | str], reason: str) -> Decision:
    """The decision where a policy casts nothing."""
    return Decision(registry().parse(op), Rule.KEEP, _widest(_read_inputs(inputs)), reason)


def _read_inputs(inputs: Iterable[torch.dtype | str]) -> list[torch.dtype]:
    """The dtypes that decide: integers beside floating-point inputs do not, and where nothing is said it is float32."""
    read = [_read_input(word) for word in inputs]
    return (
        [dtype for dtype in read if dtype.is_floating_point or dtype.is_complex]
        or read
        or [torch.float32]
    )


def _read_input(word: torch.dtype | str) -> torch.dtype:
    read: object = (
        getattr(torch, word.removeprefix("torch."), None) if isinstance(word, str) else word
    )
    if not isinstance(read, torch.dtype):
        raise PolicyError(
            "The inputs of an op are told by their dtypes, such as torch.float32 or 'float32', got"
            f" {word!r}."
        )
    return read


def _computed_in(rule: Rule, given: list[torch.dtype], half: torch.dtype) -> torch.dtype | None:
    if rule is Rule.REFUSE:
        return None
    if rule in (Rule.HALF, Rule.FULL) and CASTABLE_DTYPES.issuperset(given):
        return half if rule is Rule.HALF else torch.float32
    return _widest(given)


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    try:
        return reduce(torch.promote_types, dtypes)
    except RuntimeError:
        # float8 promotes with nothing.
        return max(dtypes, key=lambda dtype: dtype.itemsize)


_warned: set[str] = set()


@dataclass(frozen=True)
class Resolved:
    """What a policy comes to on a device."""

    dtype: torch.dtype | None
    """The 16-bit dtype to compute in; None runs everything in float32."""
    reason: str


def resolve(policy: Policy, hardware: Hardware) -> Resolved:
    """Choose the 16-bit dtype for a device, or do what the policy says when the device lacks it.

    >>> from mezzo import Policy, hardware
    >>> resolve(Policy("O1", "bfloat16"), hardware("cpu")).dtype
    torch.bfloat16
    """
    resolved = resolve_quietly(policy, hardware)
    if resolved.dtype is None and policy.level is not Level.O0:
        _downgrade(policy, hardware, resolved.reason)
    if _events.listening():
        dtype = "float32" if resolved.dtype is None else dtype_name(resolved.dtype)
        _events.emit(_events.PolicyResolved(repr(policy), hardware.device, dtype, resolved.reason))
    return resolved


def resolve_quietly(policy: Policy, hardware: Hardware) -> Resolved:
    """What `resolve` comes to, for who only asks: nothing is raised, warned or emitted."""
    if policy.level is Level.O0:
        return Resolved(None, "level O0 runs everything in float32")
    if policy.dtype is None:
        best = hardware.preferred
        return (
            Resolved(best.dtype, best.reason) if best else Resolved(None, hardware.float16.reason)
        )
    support = hardware.support(policy.dtype)
    return Resolved(policy.dtype if support.supported else None, support.reason)


def _downgrade(policy: Policy, hardware: Hardware, reason: str) -> None:
    asked = "a 16-bit dtype" if policy.dtype is None else dtype_name(policy.dtype)
    instead = [
        dtype_name(dtype)
        for dtype in (torch.float16, torch.bfloat16)
        if hardware.support(dtype).supported
    ]
    remedy = f"Use dtype={instead[0]!r}" if instead else "Use another device, or level O0"
    message = f"{hardware.name} ({hardware.device}) cannot compute in {asked}: {reason}. {remedy}"
    if policy.on_unsupported is OnUnsupported.ERROR:
        raise UnsupportedError(f"{message}; or on_unsupported='warn' to run in float32.")
    if _events.listening():
        _events.emit(_events.PolicyDowngraded(asked, "float32", hardware.device, reason))
    if policy.on_unsupported is OnUnsupported.WARN and message not in _warned:
        _warned.add(message)
        warnings.warn(f"{message}. Running in float32.", UserWarning, stacklevel=_levels_up())


def _levels_up() -> int:
    """How far up the stack the user's code is, from where it is asked."""
    frame, levels = sys._getframe(1), 1
    while (
        frame.f_back is not None
        and frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]
    ):
        frame, levels = frame.f_back, levels + 1
    return levels


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
    said = [
        (field.name, one.format_field(field.name), other.format_field(field.name))
        for field in fields(one)
        if getattr(one, field.name) != getattr(other, field.name)
    ]
    rules, others = _rules(one, hardware), _rules(other, hardware)
    return PolicyDiff(
        tuple(said),
        tuple(
            (name, rules[name], others[name])
            for name in sorted(rules)
            if rules[name] != others[name]
        ),
    )


def _rules(policy: Policy, hardware: Hardware) -> dict[str, str]:
    dtype = resolve_quietly(policy, hardware).dtype or policy.dtype or torch.float16
    return {
        name: entry.rule.value
        for name, entry in all_entries(policy, dtype, hardware.device).items()
    }
