"""A graph and the bodies of its branches and loops, each planned by itself; what passes between them is agreed on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo._torch import HigherOrderOperator
from mezzo.conversion.assignment import OUTPUTS, output_values
from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, set_dtypes
from mezzo.conversion.nodes import Role, nodes_in, values
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.planner import BodyDtypes, PlannedGraph, plan_graph

_PLANNED = frozenset(
    "cond while_loop map map_impl scan associative_scan tag_activation_checkpoint"
    " wrap_activation_checkpoint".split()
)
"""Operators whose bodies are planned; others keep theirs as they are."""

_GIVEN = "mezzo_given"
"""In the meta of a body's output: the dtypes that it gave in the model."""


@dataclass(frozen=True)
class Subgraph:
    """One graph of a program, and its plan."""

    module: GraphModule
    prefix: str
    """What stands before the names of its nodes; empty for the program itself."""
    planned: PlannedGraph


def plan_subgraphs(
    module: GraphModule,
    weights: Mapping[Node, str],
    said: ConvertOptions,
    modules: Mapping[str, nn.Module],
    prefix: str = "",
) -> list[Subgraph]:
    """Plan a graph, then the bodies in it; the graph itself comes first."""
    lent: dict[tuple[Node, Node], torch.dtype] = {}
    planned = plan_graph(module, prefix, weights, said, modules, lent)
    inside: list[Subgraph] = []
    for node in module.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _PLANNED:
            continue

        def plan_body(body: GraphModule, name: str, faults: Mapping[Node, str]) -> list[Subgraph]:
            return plan_subgraphs(
                body, faults, replace(said, keep_io_dtypes=True), modules, f"{prefix}{name}."
            )

        sections, taken = _HigherOrderCall(
            module, node, planned, said, weights, plan_body
        ).planned()
        inside += sections
        if taken:
            # What it takes and gives in 16 bits changes the plan around it.
            lent |= taken
            planned = plan_graph(module, prefix, weights, said, modules, lent)
    return [Subgraph(module, prefix, planned), *inside]


def bodies(module: GraphModule, node: Node) -> Iterator[tuple[str, GraphModule]]:
    """The graphs that an operator calls, by name."""
    for one in nodes_in(node.args):
        if one.op == "get_attr" and isinstance(
            body := getattr(module, str(one.target), None), GraphModule
        ):
            yield str(one.target), body


@dataclass(frozen=True)
class _HigherOrderCall:
    """A branch or a loop, whose bodies and surroundings agree on what passes between."""

    module: GraphModule
    node: Node
    around: PlannedGraph
    said: ConvertOptions
    weights: Mapping[Node, str]
    plan_body: Callable[[GraphModule, str, Mapping[Node, str]], list[Subgraph]]

    def planned(self) -> tuple[list[Subgraph], BodyDtypes]:
        """The plans of the bodies, and the dtypes in which they take what is handed to them."""
        match self.node.target.name():  # type: ignore[union-attr]
            case "cond":
                sections, lent = self._planned_branches()
            case "while_loop":
                sections, lent = self._planned_loop()
            case _:
                sections, lent = self._bodies(), {}
        borrowed = {
            place: one
            for place, one in self._weights().items()
            if self._demanded(sections, place) == {self.said.dtype}
        }
        lent |= {(self.node, one): self.said.dtype for one in borrowed.values()}
        return [one for found in sections for one in _borrowing(found, borrowed)], lent

    def _bodies(self) -> list[list[Subgraph]]:
        """Each body's plan, the graphs in it included."""
        found = []
        for name, body in bodies(self.module, self.node):
            placeholders = body.graph.find_nodes(op="placeholder")
            faults = {
                placeholders[place]: self.weights.get(one, "")
                for place, one in self._weights().items()
            }
            found.append(self.plan_body(body, name, faults))
        return found

    def _weights(self) -> dict[int, Node]:
        """The weights that are handed to all bodies unchanged, by their place among the bodies' inputs."""
        if not self.said.cast_params:
            return {}
        operands, fixed = self._operands()
        carried = set(nodes_in(operands[:fixed]))
        able = {
            place: one
            for place, one in enumerate(operands)
            if isinstance(one, Node) and place >= fixed and one not in carried
        }
        return {
            place: one
            for place, one in able.items()
            if self.around.choice.roles[one] is Role.WEIGHT
        }

    def _operands(self) -> tuple[tuple[Any, ...], int]:
        """What the bodies are called with, and how many of these a loop hands on to its next turn."""
        arguments: Any = self.node.args
        match self.node.target.name():  # type: ignore[union-attr]
            case "cond":
                return tuple(arguments[3]), 0
            case "while_loop":
                return (*arguments[2], *arguments[3]), len(arguments[2])
        return (), 0

    def _demanded(self, sections: list[list[Subgraph]], place: int) -> set[torch.dtype]:
        found: set[torch.dtype] = set()
        for first, *_ in sections:
            found |= first.planned.choice.demands(
                first.module.graph.find_nodes(op="placeholder")[place]
            )
        return found

    def _planned_branches(
        self,
    ) -> tuple[list[list[Subgraph]], dict[tuple[Node, Node], torch.dtype]]:
        """Branches take in 16 bits what all of them read so, and give in 16 bits what all of them make so: nothing is rounded that was not."""
        half, weights = self.said.dtype, self._weights()
        operands = {
            place: one
            for place, one in enumerate(self._operands()[0])
            if place not in weights and _is(one, torch.float32)
        }
        handed = {
            place for place, one in operands.items() if self.around.choice.dtype_of(one) is half
        }
        kept = next(_kept(body) for _, body in bodies(self.module, self.node))
        self._unify_dtypes(handed, (None,) * len(kept))
        drafts = self._bodies()
        taken = {
            place
            for place in operands
            if (read := self._demanded(drafts, place)) == {half}
            or (place in handed and read != {torch.float32})
        }
        given = [
            (
                half
                if dtype is torch.float32
                and all(_gives(draft[0], place) is half for draft in drafts)
                else dtype
            )
            for place, dtype in enumerate(kept)
        ]
        self._unify_dtypes(taken, given)
        self._retype(given)
        return self._bodies(), {(self.node, operands[place]): half for place in taken}

    def _planned_loop(self) -> tuple[list[list[Subgraph]], dict[tuple[Node, Node], torch.dtype]]:
        """A loop hands on in 16 bits what comes in 16 bits, is read so by somebody, and is made so again by each turn: nothing is rounded that was not."""
        half, (operands, carried) = self.said.dtype, self._operands()
        [*_, (_, body)] = bodies(self.module, self.node)
        kept = _kept(body)
        handed = {
            place
            for place, one in enumerate(operands[:carried])
            if _is(one, torch.float32) and self.around.choice.dtype_of(one) is half
        }
        if not all(
            isinstance(one, Node) and isinstance(one.meta.get("val"), torch.Tensor)
            for one in operands[:carried]
        ):
            return self._bodies(), {}
        while True:
            self._unify_dtypes(
                handed,
                [None if place in handed else dtype for place, dtype in enumerate(kept)],
                of=body,
            )
            drafts = self._bodies()
            lasting = {
                place
                for place in handed
                if self._demanded(drafts, place) != {torch.float32}
                and _gives(drafts[-1][0], place) is half
            }
            if lasting == handed:
                break
            handed = lasting
        given = [half if place in handed else dtype for place, dtype in enumerate(kept)]
        self._unify_dtypes(handed, given, of=body)
        self._retype(given)
        return self._bodies(), {(self.node, operands[place]): half for place in handed}

    def _retype(self, given: Collection[torch.dtype | None]) -> None:
        mode = fake_mode(self.module)
        if mode is not None:
            _retype_results(self.node, given, mode)

    def _unify_dtypes(
        self,
        taken: Collection[int],
        given: Collection[torch.dtype | None],
        *,
        of: GraphModule | None = None,
    ) -> None:
        """Note in the bodies what they take in 16 bits and what they are to give; `of` names the one that gives, where another only judges."""
        operands = self._operands()[0]
        for _, body in bodies(self.module, self.node):
            mode = fake_mode(body)
            if of is None or body is of:
                body.graph.output_node().meta[OUTPUTS] = tuple(given)
            for place, placeholder in enumerate(body.graph.find_nodes(op="placeholder")):
                if mode is not None and (
                    _is(operands[place], torch.float32) or _is(operands[place], self.said.dtype)
                ):
                    half = place in taken or not _is(operands[place], torch.float32)
                    set_dtypes(placeholder, [self.said.dtype if half else torch.float32], mode)


def _is(value: Any, dtype: torch.dtype) -> bool:
    return (
        isinstance(value, Node)
        and isinstance(value.meta.get("val"), torch.Tensor)
        and value.meta["val"].dtype is dtype
    )


def _kept(body: GraphModule) -> tuple[torch.dtype | None, ...]:
    """The dtypes that a body gave in the model, whatever was agreed on since: a body in a body is planned anew for each draft around it."""
    noted: dict[str, Any] = body.graph.output_node().meta
    kept: tuple[torch.dtype | None, ...] = noted.setdefault(_GIVEN, noted[OUTPUTS])
    return kept


def _gives(section: Subgraph, place: int) -> torch.dtype | None:
    value = output_values(section.module.graph.output_node())[place]
    return (
        section.planned.choice.dtype_of(value)
        if isinstance(value, Node) and values(value)
        else None
    )


def _retype_results(node: Node, given: Collection[torch.dtype | None], mode: Any) -> None:
    told = [
        found if dtype is None else dtype
        for dtype, found in zip(given, dtypes_of(node.meta["val"]), strict=True)
    ]
    set_dtypes(node, told, mode)
    for user in node.users:
        if isinstance(user.meta.get("val"), torch.Tensor) and isinstance(
            place := user.args[1], int
        ):
            set_dtypes(user, [told[place]], mode)


def _borrowing(sections: list[Subgraph], borrowed: Mapping[int, Node]) -> list[Subgraph]:
    """The sections of one body, its weights in the dtype that they come in."""
    first, *others = sections
    placeholders = first.module.graph.find_nodes(op="placeholder")
    choice = replace(
        first.planned.choice,
        cast_params=False,
        rounded=frozenset(placeholders[place] for place in borrowed),
    )
    return [replace(first, planned=replace(first.planned, choice=choice)), *others]
