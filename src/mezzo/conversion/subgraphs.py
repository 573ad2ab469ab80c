"""Plan a graph and the bodies of its branches and loops, and unify the dtypes between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from mezzo._torch import HigherOrderOperator
from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, set_dtypes
from mezzo.conversion.nodes import OUTPUT_DTYPES, Role, float_values, nodes_in, output_values
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.planner import BodyDtypes, PlannedGraph, plan_graph

_PLANNED = frozenset(
    "cond while_loop map map_impl scan associative_scan tag_activation_checkpoint"
    " wrap_activation_checkpoint".split()
)
"""Higher-order operators whose bodies are planned; the bodies of others are not changed."""

_MODEL_OUTPUT_DTYPES = "mezzo_given"
"""Key in the meta of a body's output: the dtypes of its results in the model."""


@dataclass(frozen=True)
class Subgraph:
    """One graph of a program, and its plan."""

    module: GraphModule
    prefix: str
    """The path of the body, put before the names of its nodes; empty for the main graph."""
    planned: PlannedGraph


def plan_subgraphs(
    module: GraphModule,
    weights: Mapping[Node, str],
    options: ConvertOptions,
    modules: Mapping[str, nn.Module],
    prefix: str = "",
) -> list[Subgraph]:
    """Plan a graph and the bodies of its branches and loops; the graph itself comes first."""
    body_dtypes: dict[tuple[Node, Node], torch.dtype] = {}
    planned = plan_graph(module, prefix, weights, options, modules, body_dtypes)
    inside: list[Subgraph] = []
    for node in module.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _PLANNED:
            continue

        def plan_body(body: GraphModule, name: str, weights: Mapping[Node, str]) -> list[Subgraph]:
            inner = replace(options, keep_io_dtypes=True)
            return plan_subgraphs(body, weights, inner, modules, f"{prefix}{name}.")

        call = _HigherOrderCall(module, node, planned, options, weights, plan_body)
        subgraphs, taken = call.plan()
        inside += subgraphs
        if taken:
            # What the call takes and returns in 16 bits changes the plan around it.
            body_dtypes |= taken
            planned = plan_graph(module, prefix, weights, options, modules, body_dtypes)
    return [Subgraph(module, prefix, planned), *inside]


@dataclass(frozen=True)
class _HigherOrderCall:
    """A branch or loop: its bodies and the graph around it need the same dtypes in between."""

    module: GraphModule
    node: Node
    around: PlannedGraph
    options: ConvertOptions
    weights: Mapping[Node, str]
    plan_body: Callable[[GraphModule, str, Mapping[Node, str]], list[Subgraph]]

    def plan(self) -> tuple[list[Subgraph], BodyDtypes]:
        """Return the plans of the bodies, and the dtypes in which they take their operands."""
        half_dtype = self.options.dtype
        match self.node.target.name():  # type: ignore[union-attr]
            case "cond":
                plans, taken = self._plan_branches()
            case "while_loop":
                plans, taken = self._plan_loop()
            case _:
                plans, taken = self._plan_bodies(), {}
        half_weights = {
            index: weight
            for index, weight in self._weight_operands().items()
            if self._demanded(plans, index) == {half_dtype}
        }
        taken |= {(self.node, weight): half_dtype for weight in half_weights.values()}
        return [
            subgraph for plan in plans for subgraph in _with_half_weights(plan, half_weights)
        ], taken

    def _plan_bodies(self) -> list[list[Subgraph]]:
        """Return each body's plan, with the plans of the graphs in it."""
        plans = []
        for name, body in _bodies(self.module, self.node):
            placeholders = body.graph.find_nodes(op="placeholder")
            weights = {
                placeholders[index]: self.weights.get(weight, "")
                for index, weight in self._weight_operands().items()
            }
            plans.append(self.plan_body(body, name, weights))
        return plans

    def _plan_branches(self) -> tuple[list[list[Subgraph]], dict[tuple[Node, Node], torch.dtype]]:
        """Plan branches so that no value is rounded that was not rounded before.

        They take an operand in 16 bits if all of them read it so, and return a result in 16 bits
        if all of them compute it so.
        """
        half_dtype, weights = self.options.dtype, self._weight_operands()
        operands = {
            index: value
            for index, value in enumerate(self._operands()[0])
            if index not in weights and _has_dtype(value, torch.float32)
        }
        passed_half = {
            index
            for index, value in operands.items()
            if self.around.assignment.dtype_of(value) is half_dtype
        }
        kept = next(_model_dtypes(body) for _, body in _bodies(self.module, self.node))
        self._set_body_dtypes(passed_half, (None,) * len(kept))
        drafts = self._plan_bodies()
        taken = {
            index
            for index in operands
            if (read := self._demanded(drafts, index)) == {half_dtype}
            or (index in passed_half and read != {torch.float32})
        }
        returned = [
            (
                half_dtype
                if dtype is torch.float32
                and all(_result_dtype(draft[0], index) is half_dtype for draft in drafts)
                else dtype
            )
            for index, dtype in enumerate(kept)
        ]
        self._set_body_dtypes(taken, returned)
        self._set_result_dtypes(returned)
        return self._plan_bodies(), {(self.node, operands[index]): half_dtype for index in taken}

    def _plan_loop(self) -> tuple[list[list[Subgraph]], dict[tuple[Node, Node], torch.dtype]]:
        """Plan a loop so that no value is rounded that was not rounded before.

        It carries a value in 16 bits if it is passed so, if an op of the body reads it so, and if
        each iteration computes it so again.
        """
        half_dtype, (operands, carried) = self.options.dtype, self._operands()
        [*_, (_, body)] = _bodies(self.module, self.node)
        kept = _model_dtypes(body)
        in_half = {
            index
            for index, value in enumerate(operands[:carried])
            if _has_dtype(value, torch.float32)
            and self.around.assignment.dtype_of(value) is half_dtype
        }
        if not all(
            isinstance(operand, Node) and isinstance(operand.meta.get("val"), torch.Tensor)
            for operand in operands[:carried]
        ):
            return self._plan_bodies(), {}
        while True:
            undecided = [None if index in in_half else dtype for index, dtype in enumerate(kept)]
            self._set_body_dtypes(in_half, undecided, returning=body)
            drafts = self._plan_bodies()
            still_half = {
                index
                for index in in_half
                if self._demanded(drafts, index) != {torch.float32}
                and _result_dtype(drafts[-1][0], index) is half_dtype
            }
            if still_half == in_half:
                break
            in_half = still_half
        returned = [half_dtype if index in in_half else dtype for index, dtype in enumerate(kept)]
        self._set_body_dtypes(in_half, returned, returning=body)
        self._set_result_dtypes(returned)
        return self._plan_bodies(), {(self.node, operands[index]): half_dtype for index in in_half}

    def _operands(self) -> tuple[tuple[Any, ...], int]:
        """Return the operands of the bodies, and how many of them a loop carries over."""
        arguments: Any = self.node.args
        match self.node.target.name():  # type: ignore[union-attr]
            case "cond":
                return tuple(arguments[3]), 0
            case "while_loop":
                return (*arguments[2], *arguments[3]), len(arguments[2])
        return (), 0

    def _weight_operands(self) -> dict[int, Node]:
        """Return the weights that are passed to all bodies unchanged, by operand index."""
        if not self.options.cast_params:
            return {}
        operands, count = self._operands()
        carried = set(nodes_in(operands[:count]))
        unchanged = {
            index: value
            for index, value in enumerate(operands)
            if isinstance(value, Node) and index >= count and value not in carried
        }
        roles = self.around.assignment.roles
        return {index: value for index, value in unchanged.items() if roles[value] is Role.WEIGHT}

    def _demanded(self, plans: list[list[Subgraph]], index: int) -> set[torch.dtype]:
        """Return the dtypes in which the bodies read an operand."""
        dtypes: set[torch.dtype] = set()
        for first, *_ in plans:
            placeholder = first.module.graph.find_nodes(op="placeholder")[index]
            dtypes |= first.planned.assignment.demands(placeholder)
        return dtypes

    def _set_body_dtypes(
        self,
        taken: Collection[int],
        returned: Collection[torch.dtype | None],
        *,
        returning: GraphModule | None = None,
    ) -> None:
        """Set which operands the bodies take in 16 bits, and the dtypes that they return.

        `returning` is the body that returns the results, if not all do: the condition of a loop
        returns a boolean.
        """
        operands, half_dtype = self._operands()[0], self.options.dtype
        for _, body in _bodies(self.module, self.node):
            mode = fake_mode(body)
            if returning is None or body is returning:
                body.graph.output_node().meta[OUTPUT_DTYPES] = tuple(returned)
            for index, placeholder in enumerate(body.graph.find_nodes(op="placeholder")):
                is_float32 = _has_dtype(operands[index], torch.float32)
                if mode is not None and (is_float32 or _has_dtype(operands[index], half_dtype)):
                    in_half = index in taken or not is_float32
                    set_dtypes(placeholder, [half_dtype if in_half else torch.float32], mode)

    def _set_result_dtypes(self, returned: Collection[torch.dtype | None]) -> None:
        mode = fake_mode(self.module)
        if mode is None:
            return
        dtypes = [
            before if dtype is None else dtype
            for dtype, before in zip(returned, dtypes_of(self.node.meta["val"]), strict=True)
        ]
        set_dtypes(self.node, dtypes, mode)
        for user in self.node.users:
            if isinstance(user.meta.get("val"), torch.Tensor) and isinstance(
                index := user.args[1], int
            ):
                set_dtypes(user, [dtypes[index]], mode)


def _bodies(module: GraphModule, node: Node) -> Iterator[tuple[str, GraphModule]]:
    """Iterate over the graphs that a higher-order operator calls, with their names."""
    for source in nodes_in(node.args):
        if source.op == "get_attr" and isinstance(
            body := getattr(module, str(source.target), None), GraphModule
        ):
            yield str(source.target), body


def _has_dtype(value: Any, dtype: torch.dtype) -> bool:
    return (
        isinstance(value, Node)
        and isinstance(value.meta.get("val"), torch.Tensor)
        and value.meta["val"].dtype is dtype
    )


def _model_dtypes(body: GraphModule) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of a body's results in the model, whatever was planned since.

    A body inside a body is planned again for each draft of the outer one.
    """
    meta: dict[str, Any] = body.graph.output_node().meta
    dtypes: tuple[torch.dtype | None, ...] = meta.setdefault(
        _MODEL_OUTPUT_DTYPES, meta[OUTPUT_DTYPES]
    )
    return dtypes


def _result_dtype(subgraph: Subgraph, index: int) -> torch.dtype | None:
    value = output_values(subgraph.module.graph.output_node())[index]
    if not isinstance(value, Node) or not float_values(value):
        return None
    return subgraph.planned.assignment.dtype_of(value)


def _with_half_weights(
    subgraphs: list[Subgraph], half_weights: Mapping[int, Node]
) -> list[Subgraph]:
    """Return the plans of one body with its weights in the dtype in which they are passed."""
    first, *others = subgraphs
    placeholders = first.module.graph.find_nodes(op="placeholder")
    assignment = replace(
        first.planned.assignment,
        cast_params=False,
        half_only=frozenset(placeholders[index] for index in half_weights),
    )
    return [replace(first, planned=replace(first.planned, assignment=assignment)), *others]
