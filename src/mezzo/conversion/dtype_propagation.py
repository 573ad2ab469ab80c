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
    op_name,
    reads,
    values,
)

ORIGIN = ("nn_module_stack", "stack_trace", "torch_fn")
"""What a node's meta tells of where it comes from."""


def fake_mode(module: GraphModule) -> FakeTensorMode | None:
    """The mode that a graph's example values belong to."""
    for node in module.graph.nodes:
        for one in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(one, FakeTensor):
                return one.fake_mode
    return None


def infer(node: Node, mode: FakeTensorMode) -> Any:
    """Run one op on its inputs' example values."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    # With torch's Python forms of ops that C++ makes of others: in torch 2.11 the latter ask a
    # tensor of any size for its number of values.
    with mode, _unnoticed(mode), torch.no_grad(), enable_python_dispatcher():
        return target(*args, **kwargs)


def with_dtypes(example: Any, dtypes: list[torch.dtype], mode: FakeTensorMode) -> Any:
    """An example value with the dtypes of its tensors replaced, its sizes and strides kept."""
    leaves, spec = pytree.tree_flatten(example)
    wanted = iter(dtypes)
    changed = [
        _with_dtype(one, next(wanted), mode) if isinstance(one, torch.Tensor) else one
        for one in leaves
    ]
    return pytree.tree_unflatten(changed, spec)


def dtypes_of(example: Any) -> list[torch.dtype]:
    """The dtypes of the tensors in an example value, in order."""
    return [one.dtype for one in pytree.tree_leaves(example) if isinstance(one, torch.Tensor)]


def propagate(module: GraphModule) -> None:
    """Give every node the dtype that its op has on the dtypes before it."""
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


def set_dtypes(node: Node, dtypes: list[torch.dtype], mode: FakeTensorMode | None) -> None:
    """Note the dtypes of a node's results, in a graph that has examples of them."""
    example = node.meta["val"]
    if mode is not None and dtypes_of(example) != dtypes:
        node.meta["val"] = with_dtypes(example, dtypes, mode)
        # What torch noted beside it holds the old dtype.
        node.meta.pop("tensor_meta", None)


def insert_cast(
    module: GraphModule, value: Node, dtype: torch.dtype, before: Node, like: Node
) -> Node:
    """Put a cast of a value before a node, noted to come from where another one does."""
    with module.graph.inserting_before(before):
        cast = module.graph.create_node(
            "call_function",
            torch.ops.aten.to.dtype,
            (value, dtype),
            name=f"{value.name}_{dtype_name(dtype)}",
        )
    cast.meta = {key: like.meta[key] for key in ORIGIN if key in like.meta}
    cast.meta["val"] = value.meta["val"]
    set_dtypes(cast, [dtype], fake_mode(module))
    return cast


def _with_dtype(example: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    if example.dtype is dtype:
        return example
    with mode, _unnoticed(mode):
        return torch.empty_strided(
            example.shape, example.stride(), dtype=dtype, device=example.device
        )


@contextmanager
def _unnoticed(mode: FakeTensorMode) -> Iterator[None]:
    """Only dtypes are wanted: what an op asks of dynamic sizes is no condition on the program, and sizes that depend on numbers are no new symbols."""
    if mode.shape_env is None:
        yield
        return
    with mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


_CONVERTS = frozenset({"copy"})
"""Ops whose result has the first input's dtype, whatever the others have."""


KNOWN_MIXED = "mezzo_mixed"
"""In the meta of a node: the dtypes that the model itself lets it read together."""


def note_mixed(module: GraphModule) -> None:
    """Note which ops the model itself gives dtypes that differ: a kernel of the user's may take them."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and (dtypes := mixed(node)):
            node.meta[KNOWN_MIXED] = dtypes


def verify(module: GraphModule) -> None:
    """Check every op of a graph and of the bodies in it, or say which one is wrong."""
    mode = fake_mode(module)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, HigherOrderOperator):
            # A closed region of another dtype casts by itself, where tensors without data do not
            # show it.
            if node.target is not wrap_with_autocast:
                _verify_bodies(module, node)
        elif isinstance(node.target, OpOverload):
            _verify_inputs(node)
            if mode is not None:
                _verify_results(node, mode)


def mixed(node: Node) -> list[torch.dtype]:
    """The float dtypes that an op reads and its kernel does not take together; empty where all is well."""
    op = op_name(node) or aten_name(node)
    target: Any = node.target
    in_place_cast = op in _CONVERTS and target._schema.name.endswith("_")
    if op in SHAPE_ONLY or op in CASTS or op in FILLS or in_place_cast:
        return []
    whole = [read for read in reads(node) if read.argument not in MIXED_PARAMETERS.get(op, ())]
    dtypes = list(dict.fromkeys(one.dtype for read in whole for one in values(read.node)))
    return [] if len(dtypes) < 2 or op in PROMOTING else dtypes  # noqa: PLR2004


def _verify_inputs(node: Node) -> None:
    if (dtypes := mixed(node)) and node.meta.get(KNOWN_MIXED) != dtypes:
        told = ", ".join(
            f"{read.node.name} {dtype_name(values(read.node)[0].dtype)}" for read in reads(node)
        )
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) reads"
            f" {' and '.join(map(dtype_name, dtypes))}, which its kernel does not take together:"
            f" {told}. Keep it in float32 with exclude={{{node.name!r}}}, and report this."
        )


def _verify_results(node: Node, mode: FakeTensorMode) -> None:
    said = dtypes_of(node.meta.get("val"))
    if not any(one.is_floating_point for one in said):
        return
    try:
        found = dtypes_of(infer(node, mode))
    except Exception as error:
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) does not run: {error}. Keep"
            f" it in float32 with exclude={{{node.name!r}}}."
        ) from error
    if found != said:
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) gives {_names(found)} where"
            f" the plan says {_names(said)}. Keep it in float32 with exclude={{{node.name!r}}}, and"
            " report this."
        )


def _verify_bodies(module: GraphModule, node: Node) -> None:
    for one in pytree.tree_leaves(node.args):
        if (
            isinstance(one, Node)
            and one.op == "get_attr"
            and isinstance(body := getattr(module, str(one.target), None), GraphModule)
        ):
            verify(body)


def _names(dtypes: list[torch.dtype]) -> Any:
    return ", ".join(map(dtype_name, dtypes)) or "nothing"
