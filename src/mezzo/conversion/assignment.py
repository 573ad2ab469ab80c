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
from mezzo._torch import HigherOrderOperator, OpOverload
from mezzo.conversion.dtype_propagation import fake_mode, set_dtypes
from mezzo.conversion.nodes import (
    MIXED_PARAMETERS,
    OUTPUT_DTYPES,
    PROMOTING,
    SHAPE_ARGUMENTS,
    Read,
    Role,
    deciding_reads,
    dtype_argument,
    float_values,
    op_name,
    output_values,
    reads,
)


@dataclass(frozen=True)
class PrecisionAssignment:
    """The precision of every node of a graph, as the minimum cut chose it."""

    roles: Mapping[Node, Role]
    """The role of each node."""
    in_half: Mapping[Node, bool]
    """Whether each op, fill and input is in 16 bits."""
    half_dtype: torch.dtype
    """The 16-bit dtype."""
    keep_io_dtypes: bool
    """Whether outputs keep the dtypes of the model."""
    cast_params: bool = True
    """Whether weights can be stored in the dtype that they are read in."""
    half_only: frozenset[Node] = field(default=frozenset())
    """Weights that are stored in 16 bits only, also if an op reads them in float32."""
    body_dtypes: Mapping[tuple[Node, Node], torch.dtype] = field(default_factory=dict)
    """The dtype in which a branch or loop takes a value, by its node and the value."""

    def dtype_of(self, node: Node) -> torch.dtype:
        """Return the dtype of a node's float values; of a weight, the first that is stored."""
        traced = float_values(node)[0].dtype
        if traced is not torch.float32:
            return traced
        role = self.roles[node]
        if role is Role.WEIGHT:
            return self.stored(node)[0]
        if role is Role.ELEMENT:
            fixed = self.roles[producer(node)] is Role.FIXED
            return traced if fixed else self.dtype_of(node.args[0])  # type: ignore[arg-type]
        if role is Role.OP and dtype_argument(node) is not None:
            return traced
        return self.half_dtype if self.in_half.get(node) else traced

    def input_dtype(self, node: Node, read: Read) -> torch.dtype | None:
        """Return the dtype in which a node reads a value, or None if it takes any."""
        match self.roles[node]:
            case Role.OP:
                return self._op_input_dtype(node, read)
            case Role.FIXED:
                return self.body_dtypes.get((node, read.node), float_values(read.node)[0].dtype)
            case Role.CAST if (
                self.cast_params and self.roles[read.node] is Role.WEIGHT and float_values(node)
            ):
                # A weight that the model casts itself is stored in that dtype.
                dtype = float_values(node)[0].dtype
                return dtype if dtype in (torch.float32, self.half_dtype) else None
            case Role.OUTPUT if self.keep_io_dtypes:
                return self._output_dtype(node, read)
        return None

    def _op_input_dtype(self, node: Node, read: Read) -> torch.dtype | None:
        op = op_name(node) or ""
        if dtype_argument(node) is not None or read.argument in SHAPE_ARGUMENTS.get(op, ()):
            return None
        if read.argument in MIXED_PARAMETERS.get(op, ()):
            return float_values(read.node)[0].dtype
        dtype = self.half_dtype if self.in_half.get(node) else torch.float32
        if op not in PROMOTING:
            return dtype
        if read not in deciding_reads(node):
            return None
        if dtype is torch.float32 and read != self._promoting_input(node):
            return None
        return dtype

    def _promoting_input(self, node: Node) -> Read:
        """Return the input that makes a promoting kernel compute in float32.

        This is one that is float32 anyway, else the one that the minimum cut counted with.
        """
        float32 = [read for read in deciding_reads(node) if self._can_be_float32(read.node)]
        return float32[0] if float32 else promoting_input(node, self.roles, {})

    def _can_be_float32(self, node: Node) -> bool:
        if self.roles[node] is Role.WEIGHT:
            return node not in self.half_only
        return self.dtype_of(node) is torch.float32

    def _output_dtype(self, node: Node, read: Read) -> torch.dtype | None:
        # A value that is returned twice has one dtype in the model.
        outputs = zip(output_values(node), node.meta.get(OUTPUT_DTYPES, ()), strict=False)
        return next(
            (dtype for value, dtype in outputs if value is read.node),
            float_values(read.node)[0].dtype,
        )

    def demands(self, node: Node) -> set[torch.dtype]:
        """Return the dtypes in which a value is read."""
        dtypes = (
            self.input_dtype(user, read)
            for user in node.users
            for read in reads(user)
            if read.node is node
        )
        return {dtype for dtype in dtypes if dtype is not None}

    def stored(self, weight: Node) -> tuple[torch.dtype, ...]:
        """Return the dtypes in which a weight is stored: two if it is read in both precisions."""
        if weight in self.half_only:
            return (self.half_dtype,)
        if not self.cast_params:
            return (torch.float32,)
        demanded = self.demands(weight)
        # An unread weight is stored in 16 bits: its values do not matter, its size does.
        return tuple(dtype for dtype in (torch.float32, self.half_dtype) if dtype in demanded) or (
            (torch.float32,) if weight.users else (self.half_dtype,)
        )


def producer(node: Node) -> Node:
    """Return the op that produced a value: for one result of several, the op that returned all."""
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


def promoting_input(
    node: Node, roles: Mapping[Node, Role], fixed: Mapping[Node, bool | None]
) -> Read:
    """Return the input to cast so that a promoting op computes in float32.

    Preferred are weights, which are cast when they are stored, then values that are float32 anyway,
    then undecided ones; among those, the value with the most dimensions.
    """

    def rank(read: Read) -> tuple[int, int]:
        preference = (
            3
            if roles[read.node] is Role.WEIGHT
            else {False: 2, None: 1, True: 0}[fixed.get(producer(read.node))]
        )
        return preference, float_values(read.node)[0].dim()

    return max(deciding_reads(node), key=rank)


# Stored weights

WEIGHT_NAME = "mezzo_name"
"""Key in a placeholder's meta: the name of the model's tensor."""

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass
class WeightPool:
    """Copies of a model's tensors, one per dtype, shared by tied weights and by programs."""

    copies: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    originals: list[torch.Tensor] = field(default_factory=list)
    """Kept alive, so that their ids stay unique."""

    def copy_of(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the copy of a tensor in a dtype; a parameter stays one, without gradient."""
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
    """The tensors of a converted program, and how its graph takes them."""

    signature: ExportGraphSignature
    state: dict[str, Any]
    """Parameters and persistent buffers by name."""
    constants: dict[str, Any]
    """Other tensors and objects by name."""
    variants: Mapping[tuple[Node, torch.dtype], Node]
    """The second placeholder of each weight that is stored in two dtypes."""


def weight_nodes(
    exported: ExportedProgram, module: GraphModule, half_dtype: torch.dtype
) -> dict[Node, str]:
    """Return the placeholders of stored tensors, each with the reason that forbids 16 bits or "".

    The tensors' names are added to the placeholders' meta.
    """
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    found = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in _STORED and spec.target is not None:
            node = placeholders[spec.arg.name]
            node.meta[WEIGHT_NAME] = spec.target
            found[node] = (
                f"{spec.target!r} holds numbers beyond the range of {dtype_name(half_dtype)}"
                if exceeds_range(_tensor(exported, spec.target), half_dtype)
                else ""
            )
    return found


def exceeds_range(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a float32 tensor holds finite numbers beyond the range of a dtype.

    >>> exceeds_range(torch.tensor([1e5, torch.inf]), torch.float16)
    True
    >>> exceeds_range(torch.tensor([1.0, torch.inf]), torch.float16)
    False
    """
    is_dense = tensor.layout is torch.strided and not tensor.is_meta
    if tensor.dtype is not torch.float32 or not tensor.numel() or not is_dense:
        return False
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach())
        largest = float(torch.maximum(high, -low))
        if not isfinite(largest):
            largest = float(tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max())
    return largest > torch.finfo(dtype).max


def rounding_errors(
    exported: ExportedProgram, assignment: PrecisionAssignment, pool: WeightPool
) -> dict[Node, float]:
    """Return the largest relative error of a row for each weight that is stored in 16 bits only."""
    errors = {}
    for node in assignment.half_only:
        tensor = _tensor(exported, node.meta[WEIGHT_NAME])
        errors[node] = row_error(tensor, pool.copy_of(tensor, assignment.half_dtype))
    return errors


def row_error(tensor: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return the largest relative error of a row, in the Euclidean norm.

    Rows of zeros and rows with infinities do not count. The error is that of a row and not of a
    single number: in float16 a few numbers near zero always underflow, and they would determine the
    error of every table.

    >>> row_error(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.5], [0.0, 0.0]]))
    0.1
    """
    if tensor.is_meta or not tensor.numel():
        return 0.0
    with torch.no_grad():
        difference = rounded.to(tensor.dtype, copy=True).sub_(tensor)
        error, size = (
            torch.linalg.vector_norm(tensor_, dim=-1, dtype=torch.float64)
            for tensor_ in (difference, tensor)
        )
        return float((error / size).nan_to_num(nan=0.0).max())


def store_weights(
    exported: ExportedProgram,
    module: GraphModule,
    assignment: PrecisionAssignment,
    pool: WeightPool,
) -> StoredWeights:
    """Copy the weights in their assigned dtypes.

    A weight that is stored in two dtypes gets a second placeholder in the graph.
    """
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
        tensors = state if spec.target in exported.state_dict else constants
        is_weight = assignment.roles[node] is Role.WEIGHT
        first, *others = assignment.stored(node) if is_weight else (tensor.dtype,)
        tensors[spec.target] = pool.copy_of(tensor, first)
        for dtype in others:
            name, target = f"{node.name}_{dtype_name(dtype)}", f"{spec.target}_{dtype_name(dtype)}"
            variants[node, dtype] = _add_placeholder(module, node, name, dtype)
            tensors[target] = pool.copy_of(tensor, dtype)
            arg = TensorArgument(name=variants[node, dtype].name)
            specs.append(InputSpec(spec.kind, arg, target, spec.persistent))
    signature = ExportGraphSignature(specs, exported.graph_signature.output_specs)
    return StoredWeights(signature, state, constants, variants)


def _tensor(exported: ExportedProgram, name: str) -> torch.Tensor:
    tensor: torch.Tensor = (
        exported.state_dict[name] if name in exported.state_dict else exported.constants[name]
    )
    return tensor


def _add_placeholder(module: GraphModule, node: Node, name: str, dtype: torch.dtype) -> Node:
    with module.graph.inserting_after(node):
        added = module.graph.placeholder(name)
    added.target, added.meta = added.name, dict(node.meta)
    set_dtypes(added, [dtype], fake_mode(module))
    return added
