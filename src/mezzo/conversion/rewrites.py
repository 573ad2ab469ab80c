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
from mezzo.conversion.assignment import NAME, WeightPool, exceeds
from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, insert_cast, set_dtypes
from mezzo.conversion.nodes import (
    FILLS,
    REWRITTEN,
    VALUE_PRESERVING,
    Rewritten,
    Role,
    aten_name,
    reads,
    values,
    written,
)
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.planner import PlannedGraph
from mezzo.policy.missing_kernels import RECURRENT

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)

_COUNTS = frozenset({"arange"})
"""What makes places of nothing."""
_EASY = VALUE_PRESERVING | _COUNTS
"""What takes no computing."""


def fold(exported: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """Replace in a graph what only weights decide by a stored tensor; weights that nobody reads any more are left out. The export itself stays as it is."""
    exported = _without_spares(exported, module)
    known = _known(exported, module)
    folded = {node: known[node] for node in _worth(known)}
    if not folded:
        return exported
    read = {node for node in module.graph.find_nodes(op="placeholder") if node.users}
    constants, specs = dict(exported.constants), list(exported.graph_signature.input_specs)
    place = sum(spec.kind is not InputKind.USER_INPUT for spec in specs)
    for node, value in folded.items():
        name = _replace(module, node, specs[place - 1].arg.name if place else None)
        constants[f"folded_{node.name}"] = value
        specs.insert(
            place,
            InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=name), f"folded_{node.name}"),
        )
        place += 1
    _sweep(module, known)
    dropped = {node.name for node in read if not node.users and node in known}
    for name in dropped:
        module.graph.erase_node(
            next(node for node in module.graph.find_nodes(op="placeholder") if node.name == name)
        )
    return _with(exported, [spec for spec in specs if spec.arg.name not in dropped], constants)


def _without_spares(exported: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """Without further names of a tensor that is read under one of them, and without what nobody reads and the model itself would not save."""
    tensors = {**exported.constants, **exported.state_dict}
    specs, nodes = (
        exported.graph_signature.input_specs,
        {node.name: node for node in module.graph.find_nodes(op="placeholder")},
    )
    named = {
        spec.arg.name: spec.target
        for spec in specs
        if spec.kind in _WEIGHTS and spec.target is not None
    }
    read = {id(tensors[target]) for name, target in named.items() if nodes[name].users}
    unread = {name: target for name, target in named.items() if not nodes[name].users}
    spare = {
        name
        for name, target in unread.items()
        if target not in exported.state_dict or id(tensors[target]) in read
    }
    for name in spare:
        module.graph.erase_node(nodes[name])
    return (
        _with(
            exported,
            [spec for spec in specs if spec.arg.name not in spare],
            dict(exported.constants),
        )
        if spare
        else exported
    )


def _known(exported: ExportedProgram, module: GraphModule) -> dict[Node, Any]:
    """The value of every node that depends on stored tensors alone, themselves included."""
    touched = written(module.graph)
    tensors = {**exported.constants, **exported.state_dict}
    named = {
        spec.arg.name: tensors[spec.target]
        for spec in exported.graph_signature.input_specs
        if spec.kind in _WEIGHTS and spec.target is not None
    }
    known: dict[Node, Any] = {
        node: named[node.name]
        for node in module.graph.find_nodes(op="placeholder")
        if node.name in named and node not in touched
    }
    for node in module.graph.nodes:
        if (
            node not in touched
            and _is_pure(node)
            and (node.all_input_nodes or aten_name(node) in _COUNTS)
            and all(one in known for one in node.all_input_nodes)
        ):
            with torch.no_grad():
                args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
    return known


def _is_pure(node: Node) -> bool:
    """Whether a call gives the same for the same tensors, in sizes that do not change."""
    sizes = [
        size
        for one in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(one, torch.Tensor)
        for size in one.shape
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


def _worth(known: Mapping[Node, Any]) -> list[Node]:
    """The values that others read and that are better stored than the weights behind them: computed and no larger, or at most half of what they make needless."""
    open_ended = [
        node
        for node, value in known.items()
        if isinstance(value, torch.Tensor) and not all(user in known for user in node.users)
    ]
    behind = {node: _behind(node) for node in open_ended if node.op == "call_function"}
    # Several may be cut from one weight, as a joint product's parts are: together they count.
    largest = {
        node: max(weights, key=lambda one: int(known[one].nbytes))
        for node, (weights, _) in behind.items()
        if weights
    }
    taken = Counter[Node]()
    for node, weight in largest.items():
        taken[weight] += _bytes(known[node], known[weight])
    found = []
    for node, weight in largest.items():
        weights, computed = behind[node]
        frees = 2 * taken[weight] <= known[weight].nbytes and all(
            user in known for user in weight.users
        )
        if frees or (
            computed and known[node].numel() <= sum(known[one].numel() for one in weights)
        ):
            found.append(node)
    return found


def _bytes(value: torch.Tensor, weight: torch.Tensor) -> int:
    """What a value takes, beside a weight that a cast would make no smaller: the dtypes of both are yet to be chosen."""
    return value.numel() * (weight if weight.is_floating_point() else value).itemsize


def _behind(node: Node) -> tuple[set[Node], bool]:
    """The weights that decide a value, and whether more than moving them does."""
    weights, computed, waiting = set[Node](), False, [node]
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder":
            weights.add(one)
        else:
            computed = computed or (
                isinstance(one.target, OpOverload) and aten_name(one) not in _EASY
            )
            waiting += one.all_input_nodes
    return weights, computed


def _replace(module: GraphModule, node: Node, after: str | None) -> str:
    """Put a placeholder in a node's place, and give its name."""
    placeholders = {one.name: one for one in module.graph.find_nodes(op="placeholder")}
    where = (
        module.graph.inserting_after(placeholders[after])
        if after in placeholders
        else module.graph.inserting_before(next(iter(module.graph.nodes)))
    )
    with where:
        made = module.graph.placeholder(f"c_{node.name}")
    made.target, made.meta = made.name, {"val": node.meta["val"]}
    node.replace_all_uses_with(made)
    return made.name


def _sweep(module: GraphModule, known: Mapping[Node, Any]) -> None:
    for node in reversed(list(known)):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)


def _with(
    exported: ExportedProgram, specs: list[InputSpec], constants: dict[str, Any]
) -> ExportedProgram:
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


_NARROW = torch.float16
_REASON = "torch.autocast runs cuDNN's recurrent layers in float16"


def layers(
    exported: ExportedProgram, planned: PlannedGraph, said: ConvertOptions
) -> frozenset[str]:
    """The recurrent layers that torch.autocast would run in another 16-bit dtype than the plan, by name; one that the call lists is left as it says."""
    if said.device != "cuda" or said.dtype is not torch.bfloat16 or torch.version.hip is not None:
        return frozenset()
    choice = planned.choice
    open_ended = [
        node
        for node, role in choice.roles.items()
        if role is Role.OP
        and aten_name(node) in RECURRENT
        and choice.halves[node]
        and aten_name(node) not in said.half
    ]
    return frozenset(
        node.name
        for node in open_ended
        if not any(exceeds(tensor, _NARROW) for tensor in _tensors(exported, node))
    )


def recurrent_to_float16(
    exported: ExportedProgram,
    module: GraphModule,
    names: Collection[str],
    pool: WeightPool,
    *,
    store: bool,
) -> ExportedProgram:
    """Put layers into float16: their weights are stored so if `store` allows, other inputs are cast, and results are cast to float32. The export itself stays as it is."""
    if not names:
        return exported
    state = dict(exported.state_dict)
    stored = {
        spec.arg.name: spec.target
        for spec in exported.graph_signature.input_specs
        if store and spec.target in state
    }
    found = [node for node in module.graph.nodes if node.name in names]
    for node in found:
        for value in dict.fromkeys(read.node for read in reads(node)):
            if values(value)[0].dtype is torch.float32:
                if all(user in found for user in value.users) and (
                    value.name in stored or aten_name(value) in FILLS
                ):
                    _store(module, value, stored.get(value.name), state, pool)
                else:
                    node.replace_input_with(value, _cast(module, value, _NARROW, node))
        _narrow_results(module, node)
    changed = copy.copy(exported)
    changed._state_dict = state
    return changed


def _tensors(exported: ExportedProgram, node: Node) -> Iterator[torch.Tensor]:
    for read in reads(node):
        if (name := read.node.meta.get(NAME)) in exported.state_dict:
            yield exported.state_dict[name]


def _store(
    module: GraphModule,
    value: Node,
    name: str | None,
    state: dict[str, torch.Tensor],
    pool: WeightPool,
) -> None:
    """Make a weight, or a state of zeros, float16."""
    if name is None:
        value.kwargs = {**value.kwargs, "dtype": _NARROW}
    else:
        state[name] = pool.take(state[name], _NARROW)
    value.meta[REWRITTEN] = Rewritten(aten_name(value), _REASON)
    set_dtypes(value, [_NARROW], fake_mode(module))


def _narrow_results(module: GraphModule, node: Node) -> None:
    mode = fake_mode(module)
    for one in (node, *node.users):
        set_dtypes(
            one,
            [_NARROW if dtype is torch.float32 else dtype for dtype in dtypes_of(one.meta["val"])],
            mode,
        )
    for element in [one for one in node.users if one.users]:
        wide = _cast(module, element, torch.float32, element.next)
        element.replace_all_uses_with(wide, lambda user, wide=wide: user is not wide)  # type: ignore[misc]
    node.meta[REWRITTEN] = Rewritten(aten_name(node), _REASON)


def _cast(module: GraphModule, value: Node, dtype: torch.dtype, before: Node) -> Node:
    made = insert_cast(module, value, dtype, before, value)
    made.meta[REWRITTEN] = Rewritten("cast", _REASON)
    return made
