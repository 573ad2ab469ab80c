"""Infer the dtypes of a graph with fake tensors, and verify them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo._torch import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    enable_python_dispatcher,
    pytree,
    wrap_with_autocast,
)
from mezzo.conversion.nodes import (
    CASTS,
    FILLS,
    MIXED_PARAMETERS,
    PROMOTING,
    SHAPE_ONLY,
    aten_name,
    float_values,
    op_name,
    reads,
)

_ORIGIN = ("nn_module_stack", "stack_trace", "torch_fn")
"""Keys in a node's meta that describe where it was called."""

_IN_PLACE_CASTS = frozenset({"copy"})
"""Ops whose in-place form casts to the dtype of its first input."""

_KNOWN_MIXED_DTYPES = "mezzo_mixed"
"""Key in a node's meta: the different dtypes that it reads in the model."""


# Infer and set dtypes


def fake_mode(module: GraphModule) -> FakeTensorMode | None:
    """Return the mode of a graph's fake tensors, or None if it has none."""
    for node in module.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def infer(node: Node, mode: FakeTensorMode) -> Any:
    """Run one op on the fake tensors of its inputs."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    # Use torch's Python decompositions: in torch 2.11 the C++ ones call numel() on tensors with
    # dynamic sizes.
    with mode, _without_guards(mode), torch.no_grad(), enable_python_dispatcher():
        return target(*args, **kwargs)


def propagate(module: GraphModule) -> None:
    """Set the dtype of every node to the one that its op returns for its inputs."""
    mode = fake_mode(module)
    if mode is None:
        return
    for node in module.graph.nodes:
        if (
            node.op == "call_function"
            and node.meta.get("val") is not None
            and isinstance(node.target, OpOverload | type(len))
        ):
            set_dtypes(node, dtypes_of(infer(node, mode)), mode)


def dtypes_of(example: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors in a node's value, in order."""
    return [leaf.dtype for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]


def set_dtypes(node: Node, dtypes: list[torch.dtype], mode: FakeTensorMode | None) -> None:
    """Set the dtypes of a node's fake tensors; do nothing if the graph has none."""
    example = node.meta["val"]
    if mode is not None and dtypes_of(example) != dtypes:
        node.meta["val"] = _with_dtypes(example, dtypes, mode)
        # torch's record of the same holds the old dtype.
        node.meta.pop("tensor_meta", None)


def insert_cast(
    module: GraphModule, value: Node, dtype: torch.dtype, before: Node, like: Node
) -> Node:
    """Insert a cast of a value before a node, with the source line and modules of `like`."""
    with module.graph.inserting_before(before):
        cast = module.graph.create_node(
            "call_function",
            torch.ops.aten.to.dtype,
            (value, dtype),
            name=f"{value.name}_{dtype_name(dtype)}",
        )
    cast.meta = {key: like.meta[key] for key in _ORIGIN if key in like.meta}
    cast.meta["val"] = value.meta["val"]
    set_dtypes(cast, [dtype], fake_mode(module))
    return cast


def _with_dtypes(example: Any, dtypes: list[torch.dtype], mode: FakeTensorMode) -> Any:
    leaves, spec = pytree.tree_flatten(example)
    remaining = iter(dtypes)
    changed = [
        _with_dtype(leaf, next(remaining), mode) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(changed, spec)


def _with_dtype(example: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    if example.dtype is dtype:
        return example
    with mode, _without_guards(mode):
        return torch.empty_strided(
            example.shape, example.stride(), dtype=dtype, device=example.device
        )


@contextmanager
def _without_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Add no guards on dynamic sizes and no symbols to the program: only dtypes are inferred."""
    if mode.shape_env is None:
        yield
        return
    with mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


# Verify


def record_mixed_dtypes(module: GraphModule) -> None:
    """Record which ops read different dtypes in the model itself: a custom kernel may take them."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and (dtypes := mixed_dtypes(node)):
            node.meta[_KNOWN_MIXED_DTYPES] = dtypes


def verify(module: GraphModule) -> None:
    """Check the dtypes of every op of a graph and its subgraphs; raise for the first wrong one."""
    mode = fake_mode(module)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, HigherOrderOperator):
            # A region of another dtype casts inside, and fake tensors do not show it.
            if node.target is not wrap_with_autocast:
                _verify_bodies(module, node)
        elif isinstance(node.target, OpOverload):
            _verify_inputs(node)
            if mode is not None:
                _verify_results(node, mode)


def mixed_dtypes(node: Node) -> list[torch.dtype]:
    """Return the float dtypes that an op reads if its kernel does not take them together."""
    op = op_name(node) or aten_name(node)
    target: Any = node.target
    in_place_cast = op in _IN_PLACE_CASTS and target._schema.name.endswith("_")
    if op in SHAPE_ONLY or op in CASTS or op in FILLS or in_place_cast:
        return []
    exempt = MIXED_PARAMETERS.get(op, ())
    dtypes = list(
        dict.fromkeys(
            value.dtype
            for read in reads(node)
            if read.argument not in exempt
            for value in float_values(read.node)
        )
    )
    return [] if len(dtypes) < 2 or op in PROMOTING else dtypes


def _verify_inputs(node: Node) -> None:
    if (dtypes := mixed_dtypes(node)) and node.meta.get(_KNOWN_MIXED_DTYPES) != dtypes:
        inputs = ", ".join(
            f"{read.node.name} {dtype_name(float_values(read.node)[0].dtype)}"
            for read in reads(node)
        )
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) reads"
            f" {' and '.join(map(dtype_name, dtypes))}, which its kernel does not take together:"
            f" {inputs}. Keep it in float32 with exclude={{{node.name!r}}}, and report this."
        )


def _verify_results(node: Node, mode: FakeTensorMode) -> None:
    planned = dtypes_of(node.meta.get("val"))
    if not any(dtype.is_floating_point for dtype in planned):
        return
    try:
        inferred = dtypes_of(infer(node, mode))
    except Exception as error:
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) does not run: {error}. Keep"
            f" it in float32 with exclude={{{node.name!r}}}."
        ) from error
    if inferred != planned:
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) returns {_names(inferred)},"
            f" and {_names(planned)} was planned. Keep it in float32 with"
            f" exclude={{{node.name!r}}}, and report this."
        )


def _verify_bodies(module: GraphModule, node: Node) -> None:
    for leaf in pytree.tree_leaves(node.args):
        if (
            isinstance(leaf, Node)
            and leaf.op == "get_attr"
            and isinstance(body := getattr(module, str(leaf.target), None), GraphModule)
        ):
            verify(body)


def _names(dtypes: list[torch.dtype]) -> str:
    return ", ".join(map(dtype_name, dtypes)) or "nothing"
