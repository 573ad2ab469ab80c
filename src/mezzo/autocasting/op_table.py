"""From a policy to what eager execution must do: a table from the functions that a mode sees to actions. What torch does itself is not in it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from mezzo._torch import get_schema, has_kernel, kernels_of
from mezzo.autocasting.composites import can_open, has_body, is_composite, opened
from mezzo.autocasting.dynamo import CARRIED, operators, refusal
from mezzo.policy.decide import effective_lists, entry_of
from mezzo.policy.missing_kernels import RECURRENT, needs_one_dtype
from mezzo.policy.policy import Policy
from mezzo.policy.presets.torch_amp import AUTOCAST_KEYS, torch_entries
from mezzo.policy.registry import (
    Function,
    Op,
    aten_overloads,
    functional_overloads,
    parameters,
    registry,
)
from mezzo.policy.types import Entry, OpLists, Rule

Value = str | int | float | bool | None


@dataclass(frozen=True)
class CastAction:
    """What happens when one function is called in a region."""

    op: str
    rule: Rule
    reason: str
    disables_torch_autocast: bool = True
    """Run with torch's own autocast off, since it would cast again inside."""
    exempt_args: tuple[tuple[int, str], ...] = ()
    """Arguments that do not decide and are never cast down, by position and name."""
    computes_in_float32: bool = False
    """The device's kernel refuses a float32 exempt argument beside 16-bit inputs: the op is then
    computed in float32, and gives its result in 16 bits."""
    halves_alone: bool = False
    """Refused with 16-bit inputs alone."""
    conditions: tuple[tuple[int, str, tuple[Value, ...], bool], ...] = ()
    """Arguments whose values make the op run in float32, by position and name, and whether the
    value that holds where it is left out is one of them."""
    takes_dtype: bool = False
    """The caller may name the dtype of the result, which then stands."""
    in_place: tuple[int, str] | None = None
    """Where the argument stands that asks to write into the input."""
    is_composite: bool = False
    """A composite: run its body, so that the ops inside are seen."""
    wraps_function: bool = False
    """An operator that takes a function, which is steered inside."""
    weights: bool = False
    """torch casts the activations itself; only the weights come from the cache."""
    cached: bool = False
    """Take the copies of weights from the region's cache."""

    @cached_property
    def plain(self) -> bool:
        """Whether no argument of a call can change the rule."""
        return not (self.conditions or self.takes_dtype or self.in_place)


Table = Mapping[Function, CastAction]

EMPTY: Table = {}

_BACKWARD: tuple[Function, ...] = (
    torch.Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)


def make_table(
    policy: Policy, dtype: torch.dtype, device: str, *, versioned: bool, alone: bool = False
) -> Table:
    """Lay out every steered function. `alone` leaves nothing to torch's own lists, for where those are not heard (torch.export)."""
    lists = effective_lists(policy, dtype, device)
    theirs = {} if alone else torch_entries(device)
    # torch's own casts are left to these: copies of ours would lie apart, and be compacted at every
    # call with a warning.
    left = RECURRENT if device == "cuda" and dtype is torch.float16 and not alone else frozenset()
    actions: dict[Function, CastAction] = {}
    for op in registry():
        entry = entry_of(lists, op.name, dtype, device)
        if op.name in left and entry.rule is Rule.HALF:
            continue
        for function in op.functions:
            action = _action(op, function, entry, lists, theirs, device, versioned=versioned)
            if action is not None:
                actions[function] = action
    if actions:
        actions |= _composites(lists, actions)
        # Backward runs in the precision that forward saved; torch's own lists know nothing of this
        # policy.
        actions |= {function: _operator(name) for function, name in operators().items()}
        actions |= {
            function: CastAction(
                "backward", Rule.KEEP, "gradients are computed in the precision of forward"
            )
            for function in _BACKWARD
        }
    return actions


def _action(
    op: Op,
    function: Function,
    entry: Entry,
    lists: OpLists,
    theirs: Mapping[str, Entry],
    device: str,
    *,
    versioned: bool,
) -> CastAction | None:
    if _writes_in_place(function) and entry.rule is not Rule.REFUSE:
        return None
    if op.name not in lists.entries and is_composite(op.name, function):
        return None
    exempt = _places(function, lists.exempt_args.get(op.name, ()))
    conditions = tuple(
        (
            *_place(function, one.argument),
            one.values,
            _default_of(function, one.argument) in one.values,
        )
        for one in lists.conditional
        if one.op == op.name
    )
    torchs = (
        theirs[op.name].rule
        if op.name in theirs and _is_cast_by_torch(function, device)
        else Rule.KEEP
    )
    if entry.rule is torchs and not exempt and not conditions:
        return (
            CastAction(
                op.name,
                entry.rule,
                entry.reason,
                disables_torch_autocast=False,
                weights=True,
                cached=True,
            )
            if versioned and entry.rule is Rule.HALF
            else None
        )
    if _has_nothing_to_cast(op, entry.rule) and not conditions and torchs is Rule.KEEP:
        return None
    quiet = _may_cast_inside(op, function)
    in_place = _place(function, "inplace") if "inplace" in parameters(function) else None
    widens = bool(exempt) and needs_one_dtype(op.name, device)
    halves_alone = op.name in lists.refused_in_half
    return CastAction(
        op.name,
        entry.rule,
        entry.reason,
        quiet,
        exempt,
        widens,
        halves_alone,
        conditions,
        "dtype" in parameters(function),
        in_place,
        cached=versioned,
    )


def _operator(name: str) -> CastAction:
    if name in CARRIED:
        return CastAction(name, Rule.KEEP, "its function is steered inside", wraps_function=True)
    return CastAction(name, Rule.REFUSE, refusal())


def _composites(lists: OpLists, known: Table) -> dict[Function, CastAction]:
    """Open every composite without a rule of its own, and wrappers around a builtin that is steered while they are left to torch."""
    steered = frozenset(action.op for action in known.values())
    found: dict[Function, CastAction] = {}
    for op in registry():
        for function in op.functions:
            if function in known or op.name in lists.entries:
                continue
            if is_composite(op.name, function) or (
                op.name in steered and can_open(op.name, function)
            ):
                opened(function)  # made now, so that compiled code finds it
                found[function] = CastAction(
                    op.name,
                    Rule.KEEP,
                    "made of several ops, each with its own rule",
                    is_composite=True,
                )
    return found


def _writes_in_place(function: Function) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name not in ("__invert__", "__iter__", "__init__")
    )


def _has_nothing_to_cast(op: Op, rule: Rule) -> bool:
    """KEEP never casts, and an op with one tensor has no widest input."""
    return rule is Rule.KEEP or (rule is Rule.PROMOTE and op.name in _single_tensor_ops())


def _may_cast_inside(op: Op, function: Function) -> bool:
    """Whether torch's own autocast would act within the call: it lists the op, or the op is made of others."""
    return (
        has_body(function)
        or op.entry is not None
        or op.name in _composite_ops()
        or any(op.name in torch_entries(device) for device in ("cpu", "cuda"))
    )


def _is_cast_by_torch(function: Function, device: str) -> bool:
    """Whether torch's autocast has a kernel for every way to call a function. Its lists name overloads, and on a CPU some are missing (`_convolution`)."""
    overloads = (
        frozenset()
        if has_body(function)
        else functional_overloads(getattr(function, "__name__", ""))
    )
    return overloads <= _registered(device)


@cache
def _registered(device: str) -> frozenset[str]:
    return frozenset(kernels_of(AUTOCAST_KEYS.get(device, "AutocastPrivateUse1")))


@cache
def _composite_ops() -> frozenset[str]:
    """The ops that C++ makes of others: torch's autocast acts on those inside."""
    made = (
        (name, f"aten::{base}.{overload}".rstrip("."))
        for name, overloads in aten_overloads().items()
        for base, overload in overloads
    )
    return frozenset(
        name for name, qualified in made if has_kernel(qualified, "CompositeImplicitAutograd")
    )


@cache
def _single_tensor_ops() -> frozenset[str]:
    """The ops that take one tensor, however they are called."""
    return frozenset(
        name
        for name, overloads in aten_overloads().items()
        if all(_tensors(base, overload) <= 1 for base, overload in overloads)
    )


def _tensors(base: str, overload: str) -> float:
    kinds = [
        str(argument.type)
        for argument in get_schema(f"aten::{base}", overload).arguments
        if not argument.is_out
    ]
    return (
        float("inf")
        if any("List[" in kind and "Tensor" in kind for kind in kinds)
        else sum("Tensor" in kind for kind in kinds)
    )


def _places(function: Function, names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple(_place(function, name) for name in names if name in parameters(function))


def _place(function: Function, name: str) -> tuple[int, str]:
    known = parameters(function)
    return (known.index(name) if name in known else -1, name)


def _default_of(function: Function, name: str) -> object:
    """What an argument is when a call leaves it out."""
    try:
        known: object = inspect.signature(function).parameters[name].default
    except (ValueError, TypeError, KeyError):
        schemas = (
            get_schema(*qualified.partition(".")[::2])
            for qualified in functional_overloads(getattr(function, "__name__", ""))
        )
        known = next(
            (
                one.default_value
                for schema in schemas
                for one in schema.arguments
                if one.name == name
            ),
            None,
        )
    return known
