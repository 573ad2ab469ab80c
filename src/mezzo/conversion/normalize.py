"""Normalize an exported graph: inline regions, drop dtype asserts, remove in-place ops."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mezzo._torch import OpOverload, assert_tensor_metadata, wrap_with_autocast
from mezzo.conversion.dtype_propagation import propagate, record_mixed_dtypes
from mezzo.conversion.nodes import (
    OUTPUT_DTYPES,
    alias_sets,
    aten_name,
    float_values,
    mutated_inputs,
    output_values,
)

REGION_META = "mezzo_region"
"""Key in a node's meta: "on" or "off" in an autocast region of the model, "kept" in a region of
mezzo, which has chosen the dtypes already."""

_CUSTOM_KEY = "mezzo_region"
"""Key under which mezzo's regions annotate nodes during torch.export."""

_SET_GRAD, _AUTOCAST = torch.ops.higher_order.wrap_with_set_grad_enabled, wrap_with_autocast


def normalize(module: GraphModule, half_dtype: torch.dtype, device: str) -> None:
    """Normalize a graph and its subgraphs, in place."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(
            inner := getattr(module, str(node.target), None), GraphModule
        ):
            normalize(inner, half_dtype, device)
    _mark_mezzo_regions(module)
    _record_output_dtypes(module)
    dtypes_changed = [
        _inline_region(module, node, half_dtype, device)
        for node in list(module.graph.nodes)
        if node.target in (_SET_GRAD, _AUTOCAST)
    ]
    _drop_metadata_asserts(module)
    _make_cast_dtypes_explicit(module)
    _remove_in_place_ops(module)
    if any(dtypes_changed):
        propagate(module)
    record_mixed_dtypes(module)
    module.recompile()


def _mark_mezzo_regions(module: GraphModule) -> None:
    for node in module.graph.nodes:
        # Other annotations were meant for the tracer, and cannot be saved.
        if (node.meta.pop("custom", None) or {}).get(_CUSTOM_KEY):
            node.meta[REGION_META] = "kept"


def _record_output_dtypes(module: GraphModule) -> None:
    """Record the dtypes of the model's outputs, which change when a region is inlined."""
    output = module.graph.output_node()
    output.meta[OUTPUT_DTYPES] = tuple(
        float_values(value)[0].dtype if isinstance(value, Node) and float_values(value) else None
        for value in output_values(output)
    )


def _inline_region(module: GraphModule, node: Node, half_dtype: torch.dtype, device: str) -> bool:
    """Inline the body of a region, and return whether dtypes change by that.

    A region of another dtype or device is not inlined: torch runs it as the model has it.
    """
    if node.target is _SET_GRAD:
        return _inline(module, node, 1, None)
    region_device, dtype, enabled = node.args[:3]
    if enabled and (region_device != device or (dtype is not None and dtype is not half_dtype)):
        return False
    return _inline(module, node, 4, "on" if enabled else "off")


def _inline(module: GraphModule, node: Node, body_index: int, mark: str | None) -> bool:
    body: Any = node.args[body_index]
    inner: GraphModule = getattr(module, body.target)
    placeholders = inner.graph.find_nodes(op="placeholder")
    copies: dict[Node, Any] = dict(zip(placeholders, node.args[body_index + 1 :], strict=True))
    results: Any = ()
    with module.graph.inserting_before(node):
        for inner_node in inner.graph.nodes:
            if inner_node.op == "output":
                results = map_arg(inner_node.args[0], copies.__getitem__)
            elif inner_node.op != "placeholder":
                copies[inner_node] = _copy_node(module, inner, inner_node, copies, mark)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not body.users:
        module.graph.erase_node(body)
    return mark == "on"


def _copy_node(
    module: GraphModule, inner: GraphModule, node: Node, copies: dict[Node, Any], mark: str | None
) -> Node:
    copied = module.graph.node_copy(node, copies.__getitem__)
    if mark is not None:
        copied.meta.setdefault(REGION_META, mark)
    if node.op == "get_attr":
        # A body inside the body moves along, under an unused name.
        name = f"{node.target}_{copied.name}"
        module.add_module(name, getattr(inner, str(node.target)))
        copied.target = name
    return copied


def _drop_metadata_asserts(module: GraphModule) -> None:
    """Drop torch's asserts about the dtype and device of a cast tensor; both may change."""
    if assert_tensor_metadata is None:
        return
    for node in module.graph.find_nodes(op="call_function", target=assert_tensor_metadata.default):
        module.graph.erase_node(node)


def _make_cast_dtypes_explicit(module: GraphModule) -> None:
    """Replace `x.type_as(y)` and `x.to(y)` by a cast to the dtype that `y` has in the model."""
    for node in list(module.graph.nodes):
        if (
            node.op == "call_function"
            and node.target in (torch.ops.aten.type_as.default, torch.ops.aten.to.other)
            and float_values(node)
        ):
            node.target = torch.ops.aten.to.dtype
            node.args, node.kwargs = (node.args[0], float_values(node)[0].dtype), {}


def _remove_in_place_ops(module: GraphModule) -> None:
    """Replace `relu_` by `relu` where the tensor has no alias: no view, buffer or input."""
    sets = alias_sets(module.graph)
    # All are found before any is replaced: `_has_no_alias` looks at the other in-place ops.
    replaceable = [
        (node, found)
        for node in module.graph.nodes
        if (found := _functional(node)) is not None and _has_no_alias(sets[node])
    ]
    for node, functional in replaceable:
        target: Node = node.args[0]
        target.replace_all_uses_with(node, lambda user, node=node: _is_after(user, node))  # type: ignore[misc]
        node.target = functional


def _has_no_alias(names: list[Node]) -> bool:
    """Return whether a memory has no alias up to its last mutation; later views only read it."""
    last = max(index for index, name in enumerate(names) if mutated_inputs(name))
    producer, *others = names[: last + 1]
    return (
        producer.op == "call_function"
        and producer.target is not operator.getitem
        and all(_functional(other) is not None for other in others)
    )


def _is_after(user: Node, node: Node) -> bool:
    return user is not node and node < user


def _functional(node: Node) -> OpOverload[..., Any] | None:
    """Return the functional form of an in-place op if its result has the same dtype, or None."""
    if (
        not isinstance(node.target, OpOverload)
        or node.target.namespace != "aten"
        or not node.target._schema.name.endswith("_")
    ):
        return None
    found = _functional_overload(node.target)
    dtypes = {value.dtype for read in node.all_input_nodes for value in float_values(read)} | {
        value.dtype for value in float_values(node)
    }
    return (
        found
        if found is not None
        and len(dtypes) == 1
        and aten_name(node) not in ("copy", "fill", "zero", "set", "resize")
        else None
    )


def _functional_overload(in_place: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """Return the overload of the functional op with the same arguments, or None.

    Its name may differ: `pow_.Scalar` takes a scalar exponent, `pow.Scalar` a scalar base.
    """
    name = in_place._schema.name.partition("::")[2][:-1]
    functional = getattr(torch.ops.aten, name, None)
    overloads = [] if functional is None else functional.overloads()
    candidates = (getattr(functional, overload) for overload in overloads)
    return next(
        (candidate for candidate in candidates if _arguments(candidate) == _arguments(in_place)),
        None,
    )


def _arguments(op: OpOverload[..., Any]) -> list[tuple[str, str, bool]]:
    return [
        (argument.name, str(argument.type), argument.kwarg_only)
        for argument in op._schema.arguments
    ]
