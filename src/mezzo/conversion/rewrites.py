"""Rewrites of a graph: constant folding, recurrent layers in float16 on CUDA."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mezzo._torch import OpOverload, pytree
from mezzo.conversion.assignment import WEIGHT_NAME, WeightPool, exceeds_range
from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, insert_cast, set_dtypes
from mezzo.conversion.nodes import (
    FILLS,
    REWRITTEN,
    VALUE_PRESERVING,
    Rewritten,
    Role,
    aten_name,
    float_values,
    mutated_nodes,
    reads,
)
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.planner import PlannedGraph
from mezzo.policy.missing_kernels import RECURRENT

# Constant folding

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)

_SOURCES = frozenset({"arange"})
"""Ops that create constants without inputs."""
_MOVES = VALUE_PRESERVING | _SOURCES
"""Ops that compute nothing new."""


def fold_constants(exported: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """Replace computations that depend only on weights by stored tensors, in place in `module`.

    Returns a program without the weights that are no longer read; `exported` is not changed.
    """
    exported = _without_unread_weights(exported, module)
    known = _constant_values(exported, module)
    folded = {node: known[node] for node in _worth_storing(known)}
    if not folded:
        return exported
    read = {node for node in module.graph.find_nodes(op="placeholder") if node.users}
    constants, specs = dict(exported.constants), list(exported.graph_signature.input_specs)
    index = sum(spec.kind is not InputKind.USER_INPUT for spec in specs)
    for node, value in folded.items():
        name = _replace_by_placeholder(module, node, specs[index - 1].arg.name if index else None)
        constants[f"folded_{node.name}"] = value
        arg = TensorArgument(name=name)
        specs.insert(index, InputSpec(InputKind.CONSTANT_TENSOR, arg, f"folded_{node.name}"))
        index += 1
    _erase_unused(module, known)
    dropped = {node.name for node in read if not node.users and node in known}
    for name in dropped:
        module.graph.erase_node(
            next(node for node in module.graph.find_nodes(op="placeholder") if node.name == name)
        )
    return _with_inputs(
        exported, [spec for spec in specs if spec.arg.name not in dropped], constants
    )


def _without_unread_weights(exported: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """Drop unread names of tied tensors, and unread tensors that `state_dict` does not have."""
    tensors = {**exported.constants, **exported.state_dict}
    specs = exported.graph_signature.input_specs
    nodes = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    named = {
        spec.arg.name: spec.target
        for spec in specs
        if spec.kind in _WEIGHTS and spec.target is not None
    }
    read = {id(tensors[target]) for name, target in named.items() if nodes[name].users}
    unread = {name: target for name, target in named.items() if not nodes[name].users}
    dropped = {
        name
        for name, target in unread.items()
        if target not in exported.state_dict or id(tensors[target]) in read
    }
    if not dropped:
        return exported
    for name in dropped:
        module.graph.erase_node(nodes[name])
    return _with_inputs(
        exported,
        [spec for spec in specs if spec.arg.name not in dropped],
        dict(exported.constants),
    )


def _constant_values(exported: ExportedProgram, module: GraphModule) -> dict[Node, Any]:
    """Return the value of every node that depends only on stored tensors, those included."""
    mutated = mutated_nodes(module.graph)
    tensors = {**exported.constants, **exported.state_dict}
    named = {
        spec.arg.name: tensors[spec.target]
        for spec in exported.graph_signature.input_specs
        if spec.kind in _WEIGHTS and spec.target is not None
    }
    constants: dict[Node, Any] = {
        node: named[node.name]
        for node in module.graph.find_nodes(op="placeholder")
        if node.name in named and node not in mutated
    }
    for node in module.graph.nodes:
        if (
            node not in mutated
            and _is_pure(node)
            and (node.all_input_nodes or aten_name(node) in _SOURCES)
            and all(source in constants for source in node.all_input_nodes)
        ):
            with torch.no_grad():
                args, kwargs = map_arg((node.args, node.kwargs), constants.__getitem__)
                constants[node] = node.target(*args, **kwargs)
    return constants


def _is_pure(node: Node) -> bool:
    """Return whether a call has static sizes and no side effects or random numbers."""
    sizes = [
        size
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
        for size in leaf.shape
    ]
    if not all(isinstance(size, int) for size in sizes):
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return (
        node.target.namespace == "aten"
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _worth_storing(constants: Mapping[Node, Any]) -> list[Node]:
    """Return the constants to store in place of the weights from which they are computed.

    Either the value takes some computing and is no larger than its weights, or it takes at most
    half of the bytes of a weight that is then no longer needed.
    """
    read_outside = [
        node
        for node, value in constants.items()
        if isinstance(value, torch.Tensor) and not all(user in constants for user in node.users)
    ]
    sources = {node: _source_weights(node) for node in read_outside if node.op == "call_function"}
    # Several values may be slices of one weight, as the parts of a joint projection are: their
    # sizes are added.
    largest = {
        node: max(weights, key=lambda weight: int(constants[weight].nbytes))
        for node, (weights, _) in sources.items()
        if weights
    }
    stored_bytes = Counter[Node]()
    for node, weight in largest.items():
        stored_bytes[weight] += _stored_bytes(constants[node], constants[weight])
    worth_storing = []
    for node, weight in largest.items():
        weights, computed = sources[node]
        replaces_weight = 2 * stored_bytes[weight] <= constants[weight].nbytes and all(
            user in constants for user in weight.users
        )
        if replaces_weight or (
            computed
            and constants[node].numel() <= sum(constants[weight].numel() for weight in weights)
        ):
            worth_storing.append(node)
    return worth_storing


def _stored_bytes(value: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the bytes of a value in the dtype of a weight: both may be stored in 16 bits later."""
    return value.numel() * (weight if weight.is_floating_point() else value).itemsize


def _source_weights(node: Node) -> tuple[set[Node], bool]:
    """Return the weights that a value depends on, and whether more is done than moving them."""
    weights, computed, waiting = set[Node](), False, [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder":
            weights.add(current)
        else:
            computed = computed or (
                isinstance(current.target, OpOverload) and aten_name(current) not in _MOVES
            )
            waiting += current.all_input_nodes
    return weights, computed


def _replace_by_placeholder(module: GraphModule, node: Node, after: str | None) -> str:
    """Replace a node by a new placeholder, and return its name."""
    placeholders = {
        placeholder.name: placeholder for placeholder in module.graph.find_nodes(op="placeholder")
    }
    insertion_point = (
        module.graph.inserting_after(placeholders[after])
        if after in placeholders
        else module.graph.inserting_before(next(iter(module.graph.nodes)))
    )
    with insertion_point:
        added = module.graph.placeholder(f"c_{node.name}")
    added.target, added.meta = added.name, {"val": node.meta["val"]}
    node.replace_all_uses_with(added)
    return added.name


def _erase_unused(module: GraphModule, known: Mapping[Node, Any]) -> None:
    for node in reversed(list(known)):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)


def _with_inputs(
    exported: ExportedProgram, specs: list[InputSpec], constants: dict[str, Any]
) -> ExportedProgram:
    """Return a shallow copy of a program with other inputs, and only the tensors they name."""
    changed = copy.copy(exported)
    kept = {spec.target for spec in specs}
    changed._graph_signature = ExportGraphSignature(specs, exported.graph_signature.output_specs)
    changed._constants = {
        name: value
        for name, value in constants.items()
        if name in kept or not isinstance(value, torch.Tensor)
    }
    changed._state_dict = {
        name: value for name, value in exported.state_dict.items() if name in kept
    }
    return changed


# Recurrent layers in float16

_REASON = "torch.autocast runs cuDNN's recurrent layers in float16"


def find_float16_layers(
    exported: ExportedProgram, planned: PlannedGraph, options: ConvertOptions
) -> frozenset[str]:
    """Return the names of the recurrent layers that torch.autocast runs in float16 on CUDA.

    Only layers that are planned in bfloat16 count, and not those that the call lists as half.
    """
    is_cuda = options.device == "cuda" and torch.version.hip is None
    if not is_cuda or options.dtype is not torch.bfloat16:
        return frozenset()
    assignment = planned.assignment
    candidates = [
        node
        for node, role in assignment.roles.items()
        if role is Role.OP
        and aten_name(node) in RECURRENT
        and assignment.in_half[node]
        and aten_name(node) not in options.half
    ]
    return frozenset(
        node.name
        for node in candidates
        if not any(exceeds_range(tensor, torch.float16) for tensor in _tensors(exported, node))
    )


def recurrent_to_float16(
    exported: ExportedProgram,
    module: GraphModule,
    names: Collection[str],
    pool: WeightPool,
    *,
    store: bool,
) -> ExportedProgram:
    """Run the named layers in float16, in place in `module`; `exported` is not changed.

    Their weights are stored in float16 if `store` is true, other inputs are cast to float16, and
    results are cast to float32.
    """
    if not names:
        return exported
    state = dict(exported.state_dict)
    stored = {
        spec.arg.name: spec.target
        for spec in exported.graph_signature.input_specs
        if store and spec.target in state
    }
    layers = [node for node in module.graph.nodes if node.name in names]
    for node in layers:
        for value in dict.fromkeys(read.node for read in reads(node)):
            if float_values(value)[0].dtype is torch.float32:
                if all(user in layers for user in value.users) and (
                    value.name in stored or aten_name(value) in FILLS
                ):
                    _store_in_float16(module, value, stored.get(value.name), state, pool)
                else:
                    node.replace_input_with(value, _cast(module, value, torch.float16, node))
        _cast_results(module, node)
    changed = copy.copy(exported)
    changed._state_dict = state
    return changed


def _tensors(exported: ExportedProgram, node: Node) -> Iterator[torch.Tensor]:
    for read in reads(node):
        if (name := read.node.meta.get(WEIGHT_NAME)) in exported.state_dict:
            yield exported.state_dict[name]


def _store_in_float16(
    module: GraphModule,
    value: Node,
    name: str | None,
    state: dict[str, torch.Tensor],
    pool: WeightPool,
) -> None:
    """Store a weight in float16, or create an initial state of zeros in float16."""
    if name is None:
        value.kwargs = {**value.kwargs, "dtype": torch.float16}
    else:
        state[name] = pool.copy_of(state[name], torch.float16)
    value.meta[REWRITTEN] = Rewritten(aten_name(value), _REASON)
    set_dtypes(value, [torch.float16], fake_mode(module))


def _cast_results(module: GraphModule, node: Node) -> None:
    mode = fake_mode(module)
    for result in (node, *node.users):
        before = dtypes_of(result.meta["val"])
        dtypes = [torch.float16 if dtype is torch.float32 else dtype for dtype in before]
        set_dtypes(result, dtypes, mode)
    for element in [user for user in node.users if user.users]:
        wide = _cast(module, element, torch.float32, element.next)
        element.replace_all_uses_with(wide, lambda user, wide=wide: user is not wide)  # type: ignore[misc]
    node.meta[REWRITTEN] = Rewritten(aten_name(node), _REASON)


def _cast(module: GraphModule, value: Node, dtype: torch.dtype, before: Node) -> Node:
    inserted = insert_cast(module, value, dtype, before, value)
    inserted.meta[REWRITTEN] = Rewritten("cast", _REASON)
    return inserted
