"""Decide the rule, dtype and reason of an op on a device.

Also resolves `dtype="auto"`, and compares two policies.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import torch

from mezzo import _events
from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name
from mezzo._errors import PolicyError, UnsupportedError, user_stack_level
from mezzo._hardware import Hardware
from mezzo.policy.missing_kernels import lacks_kernel
from mezzo.policy.parse import check_argument
from mezzo.policy.presets import preset_lists
from mezzo.policy.registry import registry
from mezzo.policy.types import Entry, Level, OnUnsupported, OpLists, Rule

if TYPE_CHECKING:
    from mezzo.policy.policy import Policy


@dataclass(frozen=True)
class Decision:
    """The dtype in which an op runs, with its rule and the reason."""

    op: str
    rule: Rule
    dtype: torch.dtype | None
    """The dtype in which the op computes; None if the op is refused."""
    reason: str

    def __str__(self) -> str:
        outcome = "is refused" if self.dtype is None else f"runs in {dtype_name(self.dtype)}"
        return f"{self.op} {outcome}: {self.reason}."


def effective_lists(policy: Policy, dtype: torch.dtype, device: str) -> OpLists:
    """Return the op lists of the policy's preset, overridden by the policy, on a device."""
    return _effective(policy, dtype, device, registry().generation)


@lru_cache(maxsize=64)
def _effective(policy: Policy, dtype: torch.dtype, device: str, _generation: int) -> OpLists:
    preset = preset_lists(policy.preset, policy.level, dtype, device)
    entries = {op.name: op.entry for op in registry() if op.entry is not None}
    entries |= preset.entries
    entries |= {
        name: Entry(rule, _by_user(rule)) for rule in Rule for name in policy.ops_with_rule(rule)
    }
    entries |= _composed_of(policy, entries)
    entries = {name: _with_kernel(name, entry, dtype, device) for name, entry in entries.items()}
    return OpLists(
        entries,
        _default_entry(policy, preset),
        dict(preset.exempt_args) | dict(policy.exempt_args),
        preset.conditional + policy.conditional,
        preset.refused_in_half - policy.ops_with_rule(Rule.REFUSE),
    )


def _default_entry(policy: Policy, preset: OpLists) -> Entry:
    rule = policy.default_rule
    if rule is None:
        return preset.default_rule
    return Entry(rule, f"in no list: the policy's default_rule is {rule.value}")


def _by_user(rule: Rule) -> str:
    if rule is Rule.FLOAT32_INSIDE:
        return "listed float32_inside by the user: sums in float32 and returns the input's dtype"
    return f"listed {rule.value} by the user"


def _with_kernel(name: str, entry: Entry, dtype: torch.dtype, device: str) -> Entry:
    if entry.rule not in (Rule.FULL, Rule.REFUSE) and lacks_kernel(name, dtype, device):
        reason = f"{entry.reason}, but it has no {dtype_name(dtype)} kernel on {device}"
        return Entry(Rule.FULL, reason)
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
"""Composite ops that torch decomposes in C++, where no function mode sees the parts. If they are in
no list themselves, they take the rule that the user gives to a part."""


def _composed_of(policy: Policy, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    listed = {
        name: rule
        for rule in (Rule.HALF, Rule.FULL, Rule.KEEP)
        for name in policy.ops_with_rule(rule)
    }
    return {
        composite: Entry(listed[part], f"computed by {part}, which is {_by_user(listed[part])}")
        for composite, parts in COMPOSED_OF.items()
        if composite not in entries
        for part in parts
        if part in listed
    }


def entry_of(lists: OpLists, name: str, dtype: torch.dtype, device: str) -> Entry:
    """Return the entry of an op; the default rule if it is not listed."""
    return lists.entries.get(name) or _with_kernel(name, lists.default_rule, dtype, device)


def all_entries(policy: Policy, dtype: torch.dtype, device: str) -> dict[str, Entry]:
    """Return the entry of every known op, sorted by name."""
    names = sorted(registry().names)
    if policy.level is Level.O0:
        # Overrides and missing kernels have no effect where nothing is cast.
        default_rule = preset_lists(policy.preset, policy.level, dtype, device).default_rule
        return dict.fromkeys(names, default_rule)
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
    """Decide the rule, the dtype and the reason for one call of an op.

    Both autocast regions and converted models carry out this decision.
    """
    input_dtypes = list(inputs)
    name, dtypes = registry().parse(op), _deciding_dtypes(input_dtypes)
    for argument in arguments or ():
        check_argument(name, argument)
    lists = effective_lists(policy, dtype, device)
    entry = _entry_for_call(
        lists,
        name,
        entry_of(lists, name, dtype, device),
        dtypes if input_dtypes else None,
        arguments,
    )
    uncastable = [dtype for dtype in dtypes if dtype not in CASTABLE_DTYPES]
    reason = (
        f"{dtype_name(uncastable[0])} inputs are never cast"
        if uncastable and entry.rule in (Rule.HALF, Rule.FULL)
        else entry.reason
    )
    return Decision(name, entry.rule, _computed_in(entry.rule, dtypes, dtype), reason)


def _entry_for_call(
    lists: OpLists,
    name: str,
    entry: Entry,
    dtypes: list[torch.dtype] | None,
    arguments: Mapping[str, Any] | None,
) -> Entry:
    """Apply conditional entries and refusals that depend on the inputs (None: not known)."""
    for condition in lists.conditional:
        if condition.op == name and arguments and condition.argument in arguments:
            value = arguments[condition.argument]
            if value in condition.values:
                entry = Entry(Rule.FULL, f"{condition.argument}={value!r}: {condition.reason}")
    if (
        entry.rule is Rule.REFUSE
        and name in lists.refused_in_half
        and dtypes is not None
        and not any(dtype in HALF_DTYPES for dtype in dtypes)
    ):
        return Entry(Rule.KEEP, "refused only with 16-bit inputs")
    return entry


def uncast_decision(op: str, inputs: Iterable[torch.dtype | str], reason: str) -> Decision:
    """Return the decision for an op whose inputs are not cast."""
    return Decision(registry().parse(op), Rule.KEEP, _widest(_deciding_dtypes(inputs)), reason)


def _deciding_dtypes(inputs: Iterable[torch.dtype | str]) -> list[torch.dtype]:
    """Return the input dtypes that decide the result: the floating-point ones if there are any.

    Without inputs, float32.
    """
    dtypes = [_parse_input_dtype(value) for value in inputs]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return floating or dtypes or [torch.float32]


def _parse_input_dtype(value: torch.dtype | str) -> torch.dtype:
    dtype: object = (
        getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    )
    if not isinstance(dtype, torch.dtype):
        raise PolicyError(
            f"{value!r} is not the dtype of an input. Pass dtypes such as torch.float32 or"
            " 'float32'."
        )
    return dtype


def _computed_in(rule: Rule, dtypes: list[torch.dtype], half: torch.dtype) -> torch.dtype | None:
    if rule is Rule.REFUSE:
        return None
    if rule in (Rule.HALF, Rule.FULL) and CASTABLE_DTYPES.issuperset(dtypes):
        return half if rule is Rule.HALF else torch.float32
    return dtypes[0] if rule is Rule.FLOAT32_INSIDE else _widest(dtypes)


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    try:
        return reduce(torch.promote_types, dtypes)
    except RuntimeError:
        # float8 does not promote with any other dtype.
        return max(dtypes, key=lambda dtype: dtype.itemsize)


_warned: set[str] = set()


@dataclass(frozen=True)
class ResolvedDtype:
    """The dtype of a policy on a device, with the reason."""

    dtype: torch.dtype | None
    """The 16-bit dtype to compute in; None if everything runs in float32."""
    reason: str


def resolve_dtype(policy: Policy, hardware: Hardware) -> ResolvedDtype:
    """Choose the 16-bit dtype for a device.

    On a device without it, raises, warns or returns None, by the policy's `on_unsupported`.

    >>> from mezzo import Policy, hardware
    >>> resolve_dtype(Policy("O1", "bfloat16"), hardware("cpu")).dtype
    torch.bfloat16
    """
    resolved = resolve_dtype_quietly(policy, hardware)
    if resolved.dtype is None and policy.level is not Level.O0:
        _downgrade(policy, hardware, resolved.reason)
    if _events.listening():
        dtype = "float32" if resolved.dtype is None else dtype_name(resolved.dtype)
        _events.emit(_events.PolicyResolved(repr(policy), hardware.device, dtype, resolved.reason))
    return resolved


def resolve_dtype_quietly(policy: Policy, hardware: Hardware) -> ResolvedDtype:
    """Return what `resolve_dtype` returns, but never raise, warn or emit an event."""
    if policy.level is Level.O0:
        return ResolvedDtype(None, "level O0 runs everything in float32")
    if policy.dtype is None:
        preferred = hardware.preferred
        if preferred is None:
            return ResolvedDtype(None, hardware.float16.reason)
        return ResolvedDtype(preferred.dtype, preferred.reason)
    support = hardware.support(policy.dtype)
    return ResolvedDtype(policy.dtype if support.supported else None, support.reason)


def _downgrade(policy: Policy, hardware: Hardware, reason: str) -> None:
    requested = "a 16-bit dtype" if policy.dtype is None else dtype_name(policy.dtype)
    supported = [dtype_name(dtype) for dtype in HALF_DTYPES if hardware.support(dtype).supported]
    remedy = f"Use dtype={supported[0]!r}" if supported else "Use another device, or level O0"
    device = f"{hardware.name} ({hardware.device})"
    message = f"{device} cannot compute in {requested}: {reason}. {remedy}"
    if policy.on_unsupported is OnUnsupported.ERROR:
        raise UnsupportedError(f"{message}; or on_unsupported='warn' to run in float32.")
    if _events.listening():
        _events.emit(_events.PolicyDowngraded(requested, "float32", hardware.device, reason))
    if policy.on_unsupported is OnUnsupported.WARN and message not in _warned:
        _warned.add(message)
        warnings.warn(f"{message}. Running in float32.", UserWarning, stacklevel=user_stack_level())


@dataclass(frozen=True)
class PolicyDiff:
    """The differences of two policies; false if there are none."""

    fields: tuple[tuple[str, Any, Any], ...]
    """Name of the field and its two values, as `Policy.format_field` returns them."""
    ops: tuple[tuple[str, str, str], ...]
    """Name of the op and its two rules."""

    def __bool__(self) -> bool:
        return bool(self.fields or self.ops)

    def __str__(self) -> str:
        lines = [f"{name}: {first} → {second}" for name, first, second in self.fields]
        lines += [f"op {name}: {first} → {second}" for name, first, second in self.ops]
        return "\n".join(lines) or "no difference"


def diff(first: Policy, second: Policy, hardware: Hardware) -> PolicyDiff:
    """Compare two policies field by field, and op by op on a device."""
    changed_fields = [
        (field.name, first.format_field(field.name), second.format_field(field.name))
        for field in fields(first)
        if getattr(first, field.name) != getattr(second, field.name)
    ]
    rules, other_rules = _rules(first, hardware), _rules(second, hardware)
    changed_ops = [
        (name, rules[name], other_rules[name])
        for name in sorted(rules)
        if rules[name] != other_rules[name]
    ]
    return PolicyDiff(tuple(changed_fields), tuple(changed_ops))


def _rules(policy: Policy, hardware: Hardware) -> dict[str, str]:
    dtype = resolve_dtype_quietly(policy, hardware).dtype or policy.dtype or torch.float16
    entries = all_entries(policy, dtype, hardware.device)
    return {name: entry.rule.value for name, entry in entries.items()}
