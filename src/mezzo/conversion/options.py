"""Options of one conversion: read them, check them against the graph, match nodes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError, nearest
from mezzo._hardware import hardware
from mezzo._torch import OpOverload
from mezzo.conversion.nodes import named_arguments, op_name
from mezzo.policy import parse
from mezzo.policy.decide import COMPOSED_OF, effective_lists, entry_of, resolve_dtype
from mezzo.policy.policy import Policy
from mezzo.policy.types import Conditional, Entry, OpLists, Rule

CastCost = Callable[[int, torch.dtype, torch.dtype], float]
"""Cost of a cast, given the bytes it reads and writes, its source dtype and its target dtype."""


def default_cast_cost(count: int, _source: torch.dtype, _target: torch.dtype) -> float:
    """Return the number of bytes as the cost of a cast."""
    return count


@dataclass(frozen=True)
class ConvertOptions:
    """The checked arguments of one conversion."""

    policy: Policy
    dtype: torch.dtype
    """The 16-bit dtype."""
    device: str
    """The device type whose op lists and kernels apply."""
    half: frozenset[str] = frozenset()
    """Ops to run in 16 bits, whatever the policy lists."""
    full: frozenset[str] = frozenset()
    """Ops to keep in float32, whatever the policy lists."""
    conditional: tuple[Conditional, ...] = ()
    """Ops to keep in float32 for some values of an argument."""
    exclude: tuple[str, ...] = ()
    """Nodes and modules to keep in float32, by name or glob."""
    cast_params: bool = True
    """Whether weights are stored in the dtype that they are read in."""
    keep_io_dtypes: bool = True
    """Whether inputs and outputs keep the dtypes of the model."""
    cast_cost: CastCost = default_cast_cost
    nothing_to_cast: str = ""
    """The reason why the whole graph stays float32; empty if ops may run in 16 bits."""

    def cast_cost_of(self, count: int, source: torch.dtype, target: torch.dtype) -> float:
        """Return the cost of a cast; raise `PolicyError` if it is not a finite number >= 0."""
        cost = self.cast_cost(count, source, target)
        if not isinstance(cost, int | float) or not 0 <= cost < float("inf"):
            raise PolicyError(
                f"cast_cost= returned {cost!r} for a cast of {count} bytes from"
                f" {dtype_name(source)} to {dtype_name(target)}. Return a finite number, at"
                " least 0."
            )
        return cost

    @property
    def lists(self) -> OpLists:
        """The policy's op lists on the device."""
        return effective_lists(self.policy, self.dtype, self.device)

    def entry(self, name: str) -> Entry:
        """Return the policy's entry for an op; an op composed of others has the entry of those."""
        lists = self.lists
        if name not in lists.entries:
            for part in COMPOSED_OF.get(name, ()):
                if (found := lists.entries.get(part)) is not None:
                    return Entry(found.rule, f"computed by {part}: {found.reason}")
        return entry_of(lists, name, self.dtype, self.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values, to be saved with the model; not the cost function."""
        return {
            "policy": self.policy.to_dict(),
            "dtype": dtype_name(self.dtype),
            "device": self.device,
            "half": sorted(self.half),
            "full": sorted(self.full),
            "conditional": [
                [condition.op, condition.argument, list(condition.values), condition.reason]
                for condition in self.conditional
            ],
            "exclude": list(self.exclude),
            "cast_params": self.cast_params,
            "keep_io_dtypes": self.keep_io_dtypes,
        }


def read_options(
    policy: Policy,
    device: str,
    *,
    half: Collection[str],
    full: Collection[str],
    conditional: Collection[Any],
    exclude: Collection[str] | str,
    cast_params: bool,
    keep_io_dtypes: bool,
    cast_cost: CastCost | None,
) -> ConvertOptions:
    """Check the arguments of `mezzo.convert`, and resolve the policy for a device type."""
    half_ops, full_ops, conditions = read_lists(half, full, conditional)
    resolved = resolve_dtype(policy, hardware(device))
    return ConvertOptions(
        policy,
        resolved.dtype or torch.bfloat16,
        device,
        half=half_ops,
        full=full_ops,
        conditional=conditions,
        exclude=read_exclude(exclude),
        cast_params=cast_params,
        keep_io_dtypes=keep_io_dtypes,
        cast_cost=cast_cost or default_cast_cost,
        nothing_to_cast=resolved.reason if resolved.dtype is None else "",
    )


def read_lists(
    half: Collection[str], full: Collection[str], conditional: Collection[Any]
) -> tuple[frozenset[str], frozenset[str], tuple[Conditional, ...]]:
    """Check the op lists of a conversion; raise `PolicyError` for unknown or repeated ops."""
    half_ops, full_ops = parse.op_names("half", half), parse.op_names("full", full)
    parse.refuse_overlaps({"half": half_ops, "full": full_ops})
    return half_ops, full_ops, parse.conditionals(conditional)


def read_exclude(exclude: Collection[str] | str) -> tuple[str, ...]:
    """Check the names and globs of `exclude=`."""
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise PolicyError(
                "exclude= takes names of nodes, paths of modules and globs such as 'encoder.*',"
                f" got {pattern!r}."
            )
    return patterns


def check_options(options: ConvertOptions, nodes: Iterable[Node], names: Collection[str]) -> None:
    """Reject ops that are not in the graph and exclusions that match nothing.

    `names` are the full names of the nodes, with the names of the bodies they are in.
    """
    listed = list(nodes)
    ops = {name for node in listed if (name := op_name(node))}
    for field, wanted in (
        ("half", options.half),
        ("full", options.full),
        ("conditional", frozenset(condition.op for condition in options.conditional)),
    ):
        for name in sorted(wanted - ops):
            raise PolicyError(
                f"{field}= lists {name!r}, and no such op is in the graph.{nearest(name, ops)} Its"
                f" ops: {', '.join(sorted(ops))}."
            )
    modules = {path for node in listed for path in module_paths(node)}
    for pattern in options.exclude:
        if not any(_matches(pattern, name) for name in (*names, *modules)):
            raise PolicyError(
                f"exclude= has {pattern!r}, which matches no node and no module of the"
                f" graph.{nearest(pattern, (*modules, *names))} `print(converted.plan)` shows both;"
                " globs such as 'encoder.*' are allowed."
            )


def module_paths(node: Node) -> list[str]:
    """Return the paths of the modules that a node was called in, the outermost first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return [path for path, *_ in stack.values() if path]


def matching_exclusion(options: ConvertOptions, node: Node, name: str) -> str | None:
    """Return the pattern of `exclude=` that matches a node, or None."""
    candidates = (name, node.name, *module_paths(node))
    return next(
        (
            pattern
            for pattern in options.exclude
            if any(_matches(pattern, candidate) for candidate in candidates)
        ),
        None,
    )


def matching_condition(conditions: Iterable[Conditional], name: str, node: Node) -> str | None:
    """Return the reason why a call's arguments keep the op in float32, or None."""
    arguments: dict[str, Any] | None = None
    for condition in conditions:
        if condition.op != name:
            continue
        arguments = dict(named_arguments(node)) if arguments is None else arguments
        if condition.argument not in arguments:
            continue
        value = _unpacked(arguments[condition.argument])
        if value in condition.values:
            return f"{condition.argument}={value!r}: {condition.reason}"
    return None


def module_rule(
    options: ConvertOptions, node: Node, modules: Mapping[str, nn.Module]
) -> tuple[Rule, str] | None:
    """Return the policy's rule for the innermost listed module around a node, with its reason."""
    if not options.policy.modules:
        return None
    for path in ("", *module_paths(node))[::-1]:
        if path in modules:
            matching = [
                (selector.rank, index, selector, rule)
                for index, (selector, rule) in enumerate(options.policy.modules)
                if selector.matches(path, modules[path])
            ]
            if matching:
                *_, selector, rule = max(matching, key=lambda found: found[:2])
                return rule, f"the policy's rule for the module {selector.text!r} is {rule.value}"
    return None


def out_of_range(node: Node, dtype: torch.dtype) -> str | None:
    """Return why a number in a call does not fit a 16-bit dtype, or None if all fit."""
    limits = torch.finfo(dtype)
    for number in _numbers(node):
        if abs(number) > limits.max and abs(number) != float("inf"):
            return f"{number:g} is beyond the range of {dtype_name(dtype)}"
        if 0 < abs(number) < limits.smallest_normal:
            return f"{number:g} is too small for {dtype_name(dtype)}"
    return None


def _numbers(node: Node) -> list[float]:
    """Return the numbers that a call computes with.

    Sizes and indices are not among them, nor is an epsilon: kernels keep it in float32.
    """
    if not isinstance(node.target, OpOverload):
        return []
    computed = {
        argument.name
        for argument in node.target._schema.arguments
        if any(kind in str(argument.type) for kind in ("number", "Tensor"))
    }
    return [
        value
        for name, value in named_arguments(node)
        if name in computed and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _unpacked(value: Any) -> Any:
    """Return the item of a list of one: `sum(dim=-1)` is traced as `dim=[-1]`."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
