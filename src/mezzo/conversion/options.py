"""The words of one conversion: its own op lists, its exclusions and its policy, checked against the graph before anything is planned."""

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
from mezzo._torch import OpOverload
from mezzo.conversion.nodes import bound, op_name
from mezzo.policy import parse
from mezzo.policy.decide import COMPOSED_OF, effective_lists, entry_of
from mezzo.policy.policy import Policy
from mezzo.policy.types import Conditional, Entry, OpLists, Rule

CastCost = Callable[[int, torch.dtype, torch.dtype], float]
"""What a cast costs: of the bytes that it reads and writes, from one dtype to another."""


def bytes_moved(count: int, _source: torch.dtype, _target: torch.dtype) -> float:
    """The price of a cast where none is measured: its bytes."""
    return count


@dataclass(frozen=True)
class ConvertOptions:
    """What the caller of one conversion said."""

    policy: Policy
    dtype: torch.dtype
    """The 16-bit dtype."""
    device: str
    """The device type whose lists and kernels count."""
    half: frozenset[str] = frozenset()
    """Ops that this conversion puts in 16 bits."""
    full: frozenset[str] = frozenset()
    """Ops that this conversion keeps in float32."""
    conditional: tuple[Conditional, ...] = ()
    """Ops that this conversion keeps in float32 for some values of an argument."""
    exclude: tuple[str, ...] = ()
    """Nodes and modules that stay float32, by name or glob."""
    cast_params: bool = True
    """Whether weights are stored in the dtype that they are read in."""
    keep_io_dtypes: bool = True
    """Whether inputs and outputs keep the dtypes of the model."""
    cast_cost: CastCost = bytes_moved
    """The price of a cast."""
    nothing_to_cast: str = ""
    """Why nothing is lowered at all, if nothing is."""

    def cast_cost_of(self, count: int, source: torch.dtype, target: torch.dtype) -> float:
        """What a cast costs, or an error if `cost` gives nothing that can be a price."""
        found = self.cast_cost(count, source, target)
        if not isinstance(found, int | float) or not 0 <= found < float("inf"):
            raise PolicyError(
                f"cast_cost= gave {found!r} for a cast of {count} bytes from {dtype_name(source)}"
                f" to {dtype_name(target)}. A price is a finite number, at least 0."
            )
        return found

    @property
    def lists(self) -> OpLists:
        """The policy's op lists on the device."""
        return effective_lists(self.policy, self.dtype, self.device)

    def entry(self, name: str) -> Entry:
        """What the policy says of an op; one that is made of others follows them."""
        lists = self.lists
        if name not in lists.entries:
            for part in COMPOSED_OF.get(name, ()):
                if (found := lists.entries.get(part)) is not None:
                    return Entry(found.rule, f"computed by {part}: {found.reason}")
        return entry_of(lists, name, self.dtype, self.device)


def read_lists(
    half: Collection[str], full: Collection[str], conditional: Collection[Any]
) -> tuple[frozenset[str], frozenset[str], tuple[Conditional, ...]]:
    """Read a conversion's own lists, or say what is wrong with them."""
    halves, fulls = parse.op_names("half", half), parse.op_names("full", full)
    parse.refuse_overlaps({"half": halves, "full": fulls})
    return halves, fulls, parse.conditionals(conditional)


def read_exclude(exclude: Collection[str] | str) -> tuple[str, ...]:
    """Read what stays float32."""
    several = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for one in several:
        if not isinstance(one, str):
            raise PolicyError(
                "exclude= takes names of nodes, paths of modules and globs such as 'encoder.*',"
                f" got {one!r}."
            )
    return several


def check_options(said: ConvertOptions, nodes: Iterable[Node], names: Collection[str]) -> None:
    """Refuse an op that is not in the graph, and an exclusion that matches nothing; `names` are the nodes' full names."""
    listed = list(nodes)
    ops = {name for node in listed if (name := op_name(node))}
    for field, wanted in (
        ("half", said.half),
        ("full", said.full),
        ("conditional", frozenset(one.op for one in said.conditional)),
    ):
        for name in sorted(wanted - ops):
            raise PolicyError(
                f"{field}= lists {name!r}, and no such op is in the graph.{nearest(name, ops)} Its"
                f" ops: {', '.join(sorted(ops))}."
            )
    modules = {path for node in listed for path in module_paths(node)}
    for pattern in said.exclude:
        if not any(_matches(pattern, one) for one in (*names, *modules)):
            raise PolicyError(
                f"exclude= has {pattern!r}, which is no node and no module of the"
                f" graph.{nearest(pattern, (*modules, *names))} `print(converted.plan)` shows both;"
                " globs such as 'encoder.*' work too."
            )


def module_paths(node: Node) -> list[str]:
    """The modules that a node was called in, the outermost first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return [path for path, *_ in stack.values() if path]


def exclusion(said: ConvertOptions, node: Node, name: str) -> str | None:
    """The pattern that keeps a node in float32, if there is one."""
    candidates = (name, node.name, *module_paths(node))
    return next(
        (pattern for pattern in said.exclude if any(_matches(pattern, one) for one in candidates)),
        None,
    )


def condition(conditions: Iterable[Conditional], name: str, node: Node) -> str | None:
    """Why an op's arguments keep it in float32, if they do."""
    arguments: dict[str, Any] | None = None
    for one in conditions:
        if one.op != name:
            continue
        arguments = dict(bound(node)) if arguments is None else arguments
        if one.argument in arguments and _plain(arguments[one.argument]) in one.values:
            return f"{one.argument}={_plain(arguments[one.argument])!r}: {one.reason}"
    return None


def module_rule(
    said: ConvertOptions, node: Node, modules: Mapping[str, nn.Module]
) -> tuple[Rule, str] | None:
    """What the policy says of the modules around a node: the innermost that a rule names decides."""
    if not said.policy.modules:
        return None
    for path in ("", *module_paths(node))[::-1]:
        if path in modules:
            found = [
                (selector.rank, place, selector, rule)
                for place, (selector, rule) in enumerate(said.policy.modules)
                if selector.matches(path, modules[path])
            ]
            if found:
                *_, selector, rule = max(found, key=lambda one: one[:2])
                return rule, f"the policy's rule for the module {selector.text!r} is {rule.value}"
    return None


def out_of_range(node: Node, dtype: torch.dtype) -> str | None:
    """Why a number written in a call does not fit a 16-bit dtype, if it does not."""
    limits = torch.finfo(dtype)
    for one in _numbers(node):
        if abs(one) > limits.max and abs(one) != float("inf"):
            return f"{one:g} is beyond the range of {dtype_name(dtype)}"
        if 0 < abs(one) < limits.smallest_normal:
            return f"{one:g} is too small for {dtype_name(dtype)}"
    return None


def _numbers(node: Node) -> list[float]:
    """The numbers that a call computes with: not sizes and places, nor an epsilon, which kernels keep in float32."""
    if not isinstance(node.target, OpOverload):
        return []
    computed = {
        one.name
        for one in node.target._schema.arguments
        if any(kind in str(one.type) for kind in ("number", "Tensor"))
    }
    return [
        value
        for name, value in bound(node)
        if name in computed and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
