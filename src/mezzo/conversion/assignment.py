"""The precision assignment: the dtype of every node and of every stored weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo._casting import cast
from mezzo._dtypes import dtype_name
from mezzo._torch import HigherOrderOperator, OpOverload, pytree
from mezzo.conversion.dtype_propagation import fake_mode, set_dtypes
from mezzo.conversion.nodes import (
    MIXED_PARAMETERS,
    PROMOTING,
    SHAPE_ARGUMENTS,
    Read,
    Role,
    deciding,
    op_name,
    reads,
    stated_dtype,
    values,
)

OUTPUTS = "mezzo_outputs"
"""In the meta of a graph's output: the dtypes that the model gave."""


@dataclass(frozen=True)
class PrecisionAssignment:
    """Which nodes run in 16 bits."""

    roles: Mapping[Node, Role]
    """What each node is."""
    halves: Mapping[Node, bool]
    """Whether each op, fill and input is in 16 bits."""
    half: torch.dtype
    """The 16-bit dtype."""
    keep_io_dtypes: bool
    """Whether outputs keep the dtypes of the model."""
    cast_params: bool = True
    """Whether weights can be stored in the dtype that they are read in."""
    rounded: frozenset[Node] = field(default=frozenset())
    """Weights that are stored in 16 bits only, whatever their readers want."""
    body_dtypes: Mapping[tuple[Node, Node], torch.dtype] = field(default_factory=dict)
    """The dtype in which a branch or loop takes a weight that its body reads."""

    def dtype_of(self, node: Node) -> torch.dtype:
        """The dtype of a node's floating-point value; of a weight's, the one that it has if nobody else decides."""
        traced = values(node)[0].dtype
        if traced is not torch.float32:
            return traced
        found = self.roles[node]
        if found is Role.WEIGHT:
            return self.stored(node)[0]
        if found is Role.ELEMENT:
            fixed = self.roles[maker(node)] is Role.FIXED
            return traced if fixed else self.dtype_of(node.args[0])  # type: ignore[arg-type]
        if found is Role.OP and stated_dtype(node) is not None:
            return traced
        return self.half if self.halves.get(node) else traced

    def input_dtype(self, node: Node, read: Read) -> torch.dtype | None:
        """The dtype in which a node reads a value; None takes it as it is."""
        match self.roles[node]:
            case Role.OP:
                return self._op_input_dtype(node, read)
            case Role.FIXED:
                return self.body_dtypes.get((node, read.node), values(read.node)[0].dtype)
            case Role.CAST if (
                self.cast_params and self.roles[read.node] is Role.WEIGHT and values(node)
            ):
                # A weight that the model casts itself is stored that way.
                return (
                    values(node)[0].dtype
                    if values(node)[0].dtype in (torch.float32, self.half)
                    else None
                )
            case Role.OUTPUT if self.keep_io_dtypes:
                return self._output_dtype(node, read)
        return None

    def _op_input_dtype(self, node: Node, read: Read) -> torch.dtype | None:
        op = op_name(node) or ""
        if stated_dtype(node) is not None or read.argument in SHAPE_ARGUMENTS.get(op, ()):
            return None
        if read.argument in MIXED_PARAMETERS.get(op, ()):
            return values(read.node)[0].dtype
        wanted = self.half if self.halves.get(node) else torch.float32
        if op not in PROMOTING:
            return wanted
        if read not in deciding(node):
            return None
        if wanted is torch.float32 and read != self._carrier(node):
            return None
        return wanted

    def _carrier(self, node: Node) -> Read:
        """The input that makes a promoting kernel compute in float32: one that is float32 anyhow, else the planned one."""
        able = deciding(node)
        ready = [read for read in able if self._can_be_full(read.node)]
        return ready[0] if ready else carrier(node, self.roles, {})

    def _can_be_full(self, node: Node) -> bool:
        return (
            node not in self.rounded
            if self.roles[node] is Role.WEIGHT
            else self.dtype_of(node) is torch.float32
        )

    def _output_dtype(self, node: Node, read: Read) -> torch.dtype | None:
        # One value may be returned twice, in the one dtype that it had.
        told = zip(output_values(node), node.meta.get(OUTPUTS, ()), strict=False)
        return next(
            (dtype for value, dtype in told if value is read.node), values(read.node)[0].dtype
        )

    def demands(self, node: Node) -> set[torch.dtype]:
        """The dtypes in which a value is read."""
        wanted = (
            self.input_dtype(user, read)
            for user in node.users
            for read in reads(user)
            if read.node is node
        )
        return {dtype for dtype in wanted if dtype is not None}

    def stored(self, weight: Node) -> tuple[torch.dtype, ...]:
        """The dtypes that a weight is stored in: one, or two where its readers disagree."""
        if weight in self.rounded:
            return (self.half,)
        if not self.cast_params:
            return (torch.float32,)
        wanted = self.demands(weight)
        # What nobody reads is not worth four bytes a number.
        return tuple(dtype for dtype in (torch.float32, self.half) if dtype in wanted) or (
            (torch.float32,) if weight.users else (self.half,)
        )


def output_values(node: Node) -> list[Any]:
    """What a graph returns, in order."""
    return pytree.tree_leaves(node.args, is_leaf=lambda value: isinstance(value, Node))


def maker(node: Node) -> Node:
    """The op that made a value: for one result of several, the op before it."""
    while (
        node.op == "call_function"
        and not isinstance(node.target, OpOverload)
        and node.args
        and isinstance(above := node.args[0], Node)
    ):
        if isinstance(node.target, HigherOrderOperator):
            break
        node = above
    return node


def carrier(node: Node, roles: Mapping[Node, Role], settled: Mapping[Node, bool | None]) -> Read:
    """The input through which a promoting op would come to float32: a weight, one that is settled float32, else the largest that is open."""

    def rank(read: Read) -> tuple[int, int]:
        free = (
            3
            if roles[read.node] is Role.WEIGHT
            else {False: 2, None: 1, True: 0}[settled.get(maker(read.node))]
        )
        return free, values(read.node)[0].dim()

    return max(deciding(node), key=rank)


NAME = "mezzo_name"
"""In a placeholder's meta: the name of the tensor that the model has for it."""

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass
class WeightPool:
    """Copies of a model's tensors, one for each dtype: programs of several sizes share them, and so do tied weights."""

    copies: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    originals: list[torch.Tensor] = field(default_factory=list)
    """Kept, so that no other tensor gets the identity of one that is gone."""

    def take(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of a tensor in a dtype; a parameter stays one, and wants no gradient."""
        key = id(tensor), dtype
        if key not in self.copies:
            self.originals.append(tensor)
            with torch.no_grad():
                copied = (
                    cast(tensor.detach(), dtype)
                    if tensor.dtype is not dtype
                    else tensor.detach().clone()
                )
            self.copies[key] = (
                nn.Parameter(copied, requires_grad=False)
                if isinstance(tensor, nn.Parameter)
                else copied
            )
        return self.copies[key]


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a program, and how its graph takes them."""

    signature: ExportGraphSignature
    state: dict[str, Any]
    """Parameters and persistent buffers by name."""
    constants: dict[str, Any]
    """Other tensors and objects by name."""
    variants: Mapping[tuple[Node, torch.dtype], Node]
    """The second placeholder of each weight that is stored twice."""


def weight_nodes(
    exported: ExportedProgram, module: GraphModule, half: torch.dtype
) -> dict[Node, str]:
    """The placeholders of stored tensors, each with what forbids 16 bits, or nothing; the tensors' names are noted on them."""
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    found = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in _STORED and spec.target is not None:
            node = placeholders[spec.arg.name]
            node.meta[NAME] = spec.target
            beyond = exceeds(_tensor(exported, spec.target), half)
            found[node] = (
                f"{spec.target!r} holds numbers beyond the range of {dtype_name(half)}"
                if beyond
                else ""
            )
    return found


def rounding_errors(
    exported: ExportedProgram, choice: PrecisionAssignment, pool: WeightPool
) -> dict[Node, float]:
    """Return the largest relative error of a row, for each table and other weight that is stored in 16 bits whatever its readers want."""
    found = {}
    for node in choice.rounded:
        tensor = _tensor(exported, node.meta[NAME])
        found[node] = row_error(tensor, pool.take(tensor, choice.half))
    return found


def row_error(tensor: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return the largest relative error of a row, in the Euclidean norm. Rows of zeros and rows with infinities do not count.

    Not of a single number: in float16 a few numbers near zero always underflow, and that would be
    the error of every table.

    >>> row_error(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.5], [0.0, 0.0]]))
    0.1
    """
    if tensor.is_meta or not tensor.numel():
        return 0.0
    with torch.no_grad():
        difference = rounded.to(tensor.dtype, copy=True).sub_(tensor)
        error, size = (
            torch.linalg.vector_norm(one, dim=-1, dtype=torch.float64)
            for one in (difference, tensor)
        )
        return float((error / size).nan_to_num(nan=0.0).max())


def store_weights(
    exported: ExportedProgram, module: GraphModule, choice: PrecisionAssignment, pool: WeightPool
) -> StoredWeights:
    """Choose the copies that a program stores, and give its graph a second placeholder where a weight is stored twice."""
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    state: dict[str, Any] = {}
    constants: dict[str, Any] = {
        name: value
        for name, value in exported.constants.items()
        if not isinstance(value, torch.Tensor)
    }
    specs: list[InputSpec] = []
    variants: dict[tuple[Node, torch.dtype], Node] = {}
    for spec in exported.graph_signature.input_specs:
        specs.append(spec)
        if spec.kind not in _STORED or spec.target is None:
            continue
        node, tensor = placeholders[spec.arg.name], _tensor(exported, spec.target)
        place = state if spec.target in exported.state_dict else constants
        dtypes = choice.stored(node) if choice.roles[node] is Role.WEIGHT else (tensor.dtype,)
        place[spec.target] = pool.take(tensor, dtypes[0])
        for dtype in dtypes[1:]:
            name, target = f"{node.name}_{dtype_name(dtype)}", f"{spec.target}_{dtype_name(dtype)}"
            variants[node, dtype] = _second(module, node, name, dtype)
            place[target] = pool.take(tensor, dtype)
            specs.append(
                InputSpec(
                    spec.kind,
                    TensorArgument(name=variants[node, dtype].name),
                    target,
                    spec.persistent,
                )
            )
    return StoredWeights(
        ExportGraphSignature(specs, exported.graph_signature.output_specs),
        state,
        constants,
        variants,
    )


def _tensor(exported: ExportedProgram, name: str) -> torch.Tensor:
    found: torch.Tensor = (
        exported.state_dict[name] if name in exported.state_dict else exported.constants[name]
    )
    return found


def exceeds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a float32 tensor holds finite numbers beyond the range of a dtype.

    >>> exceeds(torch.tensor([1e5, torch.inf]), torch.float16), exceeds(torch.tensor([1.0, torch.inf]), torch.float16)
    (True, False)
    """
    if tensor.dtype is not torch.float32 or not tensor.numel() or tensor.is_meta:
        return False
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach())
        largest = float(torch.maximum(high, -low))
        if not isfinite(largest):
            largest = float(tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max())
    return largest > torch.finfo(dtype).max


def _second(module: GraphModule, node: Node, name: str, dtype: torch.dtype) -> Node:
    with module.graph.inserting_after(node):
        made = module.graph.placeholder(name)
    made.target, made.meta = made.name, dict(node.meta)
    set_dtypes(made, [dtype], fake_mode(module))
    return made
