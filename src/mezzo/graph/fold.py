"""What weights alone decide, decided once: a weight norm's product, the exponential of a learnt temperature, the first rows of a table of positions."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mezzo._torch import OpOverload, pytree
from mezzo.graph.aliases import written
from mezzo.graph.nodes import base
from mezzo.graph.traits import EXACT

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)

_COUNTS = frozenset({"arange"})
"""What makes places of nothing."""
_EASY = EXACT | _COUNTS
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
        specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=name), f"folded_{node.name}"))
        place += 1
    _sweep(module, known)
    dropped = {node.name for node in read if not node.users and node in known}
    for name in dropped:
        module.graph.erase_node(next(node for node in module.graph.find_nodes(op="placeholder") if node.name == name))
    return _with(exported, [spec for spec in specs if spec.arg.name not in dropped], constants)


def _without_spares(exported: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """Without further names of a tensor that is read under one of them, and without what nobody reads and the model itself would not save."""
    tensors = {**exported.constants, **exported.state_dict}
    specs, nodes = exported.graph_signature.input_specs, {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    named = {spec.arg.name: spec.target for spec in specs if spec.kind in _WEIGHTS and spec.target is not None}
    read = {id(tensors[target]) for name, target in named.items() if nodes[name].users}
    unread = {name: target for name, target in named.items() if not nodes[name].users}
    spare = {name for name, target in unread.items() if target not in exported.state_dict or id(tensors[target]) in read}
    for name in spare:
        module.graph.erase_node(nodes[name])
    return _with(exported, [spec for spec in specs if spec.arg.name not in spare], dict(exported.constants)) if spare else exported


def _known(exported: ExportedProgram, module: GraphModule) -> dict[Node, Any]:
    """The value of every node that depends on stored tensors alone, themselves included."""
    touched = written(module.graph)
    tensors = {**exported.constants, **exported.state_dict}
    named = {spec.arg.name: tensors[spec.target] for spec in exported.graph_signature.input_specs if spec.kind in _WEIGHTS and spec.target is not None}
    known: dict[Node, Any] = {node: named[node.name] for node in module.graph.find_nodes(op="placeholder") if node.name in named and node not in touched}
    for node in module.graph.nodes:
        if node not in touched and _is_pure(node) and (node.all_input_nodes or base(node) in _COUNTS) and all(one in known for one in node.all_input_nodes):
            with torch.no_grad():
                args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
    return known


def _is_pure(node: Node) -> bool:
    """Whether a call gives the same for the same tensors, in sizes that do not change."""
    sizes = [size for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor) for size in one.shape]
    if not all(isinstance(size, int) for size in sizes):
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return node.target.namespace == "aten" and not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _worth(known: Mapping[Node, Any]) -> list[Node]:
    """The values that others read and that are better stored than the weights behind them: computed and no larger, or at most half of what they make needless."""
    open_ended = [node for node, value in known.items() if isinstance(value, torch.Tensor) and not all(user in known for user in node.users)]
    behind = {node: _behind(node) for node in open_ended if node.op == "call_function"}
    # Several may be cut from one weight, as a joint product's parts are: together they count.
    largest = {node: max(weights, key=lambda one: int(known[one].nbytes)) for node, (weights, _) in behind.items() if weights}
    taken = Counter[Node]()
    for node, weight in largest.items():
        taken[weight] += _bytes(known[node], known[weight])
    found = []
    for node, weight in largest.items():
        weights, computed = behind[node]
        frees = 2 * taken[weight] <= known[weight].nbytes and all(user in known for user in weight.users)
        if frees or (computed and known[node].numel() <= sum(known[one].numel() for one in weights)):
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
            computed = computed or (isinstance(one.target, OpOverload) and base(one) not in _EASY)
            waiting += one.all_input_nodes
    return weights, computed


def _replace(module: GraphModule, node: Node, after: str | None) -> str:
    """Put a placeholder in a node's place, and give its name."""
    placeholders = {one.name: one for one in module.graph.find_nodes(op="placeholder")}
    where = module.graph.inserting_after(placeholders[after]) if after in placeholders else module.graph.inserting_before(next(iter(module.graph.nodes)))
    with where:
        made = module.graph.placeholder(f"c_{node.name}")
    made.target, made.meta = made.name, {"val": node.meta["val"]}
    node.replace_all_uses_with(made)
    return made.name


def _sweep(module: GraphModule, known: Mapping[Node, Any]) -> None:
    for node in reversed(list(known)):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)


def _with(exported: ExportedProgram, specs: list[InputSpec], constants: dict[str, Any]) -> ExportedProgram:
    changed = copy.copy(exported)
    kept = {spec.target for spec in specs}
    changed._graph_signature = ExportGraphSignature(specs, exported.graph_signature.output_specs)
    changed._constants = {name: value for name, value in constants.items() if name in kept or not isinstance(value, torch.Tensor)}
    changed._state_dict = {name: value for name, value in exported.state_dict.items() if name in kept}
    return changed
