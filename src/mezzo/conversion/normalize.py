"""A graph made ready for planning: regions opened, checks of old dtypes dropped, writing in place replaced where nobody can tell the difference."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mezzo._torch import OpOverload, assert_tensor_metadata, wrap_with_autocast
from mezzo.conversion.assignment import OUTPUTS, output_values
from mezzo.conversion.dtype_propagation import note_mixed, propagate
from mezzo.conversion.nodes import alias_sets, aten_name, values, writes

REGION_META = "mezzo_region"
"""In a node's meta: whether a region of the user's around it switches autocast on or off, or is
one of mezzo's, which has settled its dtypes."""

_NOTE = "mezzo_region"
"""What mezzo's regions have torch.export note."""

_GRAD, _AUTOCAST = torch.ops.higher_order.wrap_with_set_grad_enabled, wrap_with_autocast


def normalize(module: GraphModule, half: torch.dtype, device: str) -> None:
    """Tidy a graph and the bodies in it, in place."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(
            inner := getattr(module, str(node.target), None), GraphModule
        ):
            normalize(inner, half, device)
    _read_notes(module)
    _note_outputs(module)
    opened = [
        _open(module, node, half, device)
        for node in list(module.graph.nodes)
        if node.target in (_GRAD, _AUTOCAST)
    ]
    _drop_checks(module)
    _say_dtypes(module)
    _write_elsewhere(module)
    if any(opened):
        propagate(module)
    note_mixed(module)
    module.recompile()


def _read_notes(module: GraphModule) -> None:
    for node in module.graph.nodes:
        # Whatever else is noted was for the tracer, and cannot be saved.
        if (node.meta.pop("custom", None) or {}).get(_NOTE):
            node.meta[REGION_META] = "kept"


def _note_outputs(module: GraphModule) -> None:
    """Remember the dtypes that the model gives: in an opened region they may change."""
    output = module.graph.output_node()
    output.meta[OUTPUTS] = tuple(
        values(one)[0].dtype if isinstance(one, Node) and values(one) else None
        for one in output_values(output)
    )


def _open(module: GraphModule, node: Node, half: torch.dtype, device: str) -> bool:
    """Put a region's body where its call is. A region of another dtype or device stays closed: torch runs it as the user wrote it."""
    if node.target is _GRAD:
        return _inline(module, node, 1, None)
    kind, dtype, enabled = node.args[:3]
    if enabled and (kind != device or (dtype is not None and dtype is not half)):
        return False
    return _inline(module, node, 4, "on" if enabled else "off")


def _inline(module: GraphModule, node: Node, place: int, mark: str | None) -> bool:
    body: Any = node.args[place]
    inner: GraphModule = getattr(module, body.target)
    placeholders = inner.graph.find_nodes(op="placeholder")
    known: dict[Node, Any] = dict(zip(placeholders, node.args[place + 1 :], strict=True))
    results: Any = ()
    with module.graph.inserting_before(node):
        for one in inner.graph.nodes:
            if one.op == "output":
                results = map_arg(one.args[0], known.__getitem__)
            elif one.op != "placeholder":
                known[one] = _copied(module, inner, one, known, mark)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not body.users:
        module.graph.erase_node(body)
    return mark == "on"


def _copied(
    module: GraphModule, inner: GraphModule, node: Node, known: dict[Node, Any], mark: str | None
) -> Node:
    made = module.graph.node_copy(node, known.__getitem__)
    if mark is not None:
        made.meta.setdefault(REGION_META, mark)
    if node.op == "get_attr":
        # A body inside the body moves along under a name of its own.
        name = f"{node.target}_{made.name}"
        module.add_module(name, getattr(inner, str(node.target)))
        made.target = name
    return made


def _drop_checks(module: GraphModule) -> None:
    """torch notes the dtype and device that a tensor had before the user converted it; both may change."""
    if assert_tensor_metadata is None:
        return
    for node in module.graph.find_nodes(op="call_function", target=assert_tensor_metadata.default):
        module.graph.erase_node(node)


def _say_dtypes(module: GraphModule) -> None:
    """A conversion to another tensor's dtype means the dtype that it had."""
    for node in list(module.graph.nodes):
        if (
            node.op == "call_function"
            and node.target in (torch.ops.aten.type_as.default, torch.ops.aten.to.other)
            and values(node)
        ):
            node.target = torch.ops.aten.to.dtype
            node.args, node.kwargs = (node.args[0], values(node)[0].dtype), {}


def _write_elsewhere(module: GraphModule) -> None:
    """Replace `relu_` by `relu` where the tensor has no other name: no view of it, no buffer, no input."""
    sets = alias_sets(module.graph)
    # Found before any is replaced: what a memory's other names do tells whether it is private.
    private = [
        (node, found)
        for node in module.graph.nodes
        if (found := _functional(node)) is not None and _is_private(sets[node])
    ]
    for node, functional in private:
        target: Node = node.args[0]
        target.replace_all_uses_with(node, lambda user, node=node: _is_after(user, node))  # type: ignore[misc]
        node.target = functional


def _is_private(names: list[Node]) -> bool:
    """Whether a memory has no second name up to the last write; a view that is made afterwards only reads."""
    last = max(place for place, one in enumerate(names) if writes(one))
    maker, *others = names[: last + 1]
    return (
        maker.op == "call_function"
        and maker.target is not operator.getitem
        and all(_functional(one) is not None for one in others)
    )


def _is_after(user: Node, node: Node) -> bool:
    return user is not node and node < user


def _functional(node: Node) -> OpOverload[..., Any] | None:
    """The op that gives back what this one writes in place, if its result has the same dtype."""
    if (
        not isinstance(node.target, OpOverload)
        or node.target.namespace != "aten"
        or not node.target._schema.name.endswith("_")
    ):
        return None
    found = getattr(
        getattr(torch.ops.aten, node.target._schema.name.partition("::")[2][:-1], None),
        node.target._overloadname,
        None,
    )
    dtypes = {one.dtype for read in node.all_input_nodes for one in values(read)} | {
        one.dtype for one in values(node)
    }
    return (
        found
        if found is not None
        and len(dtypes) == 1
        and aten_name(node) not in ("copy", "fill", "zero", "set", "resize")
        else None
    )
