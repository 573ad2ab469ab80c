"""A graph's ops run on tensors without data, to learn the dtypes that torch itself gives their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from mezzo._dtypes import dtype_name
from mezzo._torch import FakeTensor, FakeTensorMode, OpOverload, enable_python_dispatcher, pytree

ORIGIN = ("nn_module_stack", "stack_trace", "torch_fn")
"""What a node's meta tells of where it comes from."""


def fake_mode(module: GraphModule) -> FakeTensorMode | None:
    """The mode that a graph's example values belong to."""
    for node in module.graph.nodes:
        for one in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(one, FakeTensor):
                return one.fake_mode
    return None


def run(node: Node, mode: FakeTensorMode) -> Any:
    """Run one op on its inputs' example values."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    # With torch's Python forms of ops that C++ makes of others: in torch 2.11 the latter ask a tensor of any size for its number of values.
    with mode, _unnoticed(mode), torch.no_grad(), enable_python_dispatcher():
        return target(*args, **kwargs)


def with_dtypes(example: Any, dtypes: list[torch.dtype], mode: FakeTensorMode) -> Any:
    """An example value with the dtypes of its tensors replaced, its sizes and strides kept."""
    leaves, spec = pytree.tree_flatten(example)
    wanted = iter(dtypes)
    changed = [_with_dtype(one, next(wanted), mode) if isinstance(one, torch.Tensor) else one for one in leaves]
    return pytree.tree_unflatten(changed, spec)


def dtypes_of(example: Any) -> list[torch.dtype]:
    """The dtypes of the tensors in an example value, in order."""
    return [one.dtype for one in pytree.tree_leaves(example) if isinstance(one, torch.Tensor)]


def retype(module: GraphModule) -> None:
    """Give every node the dtype that its op has on the dtypes before it."""
    mode = fake_mode(module)
    if mode is None:
        return
    for node in module.graph.nodes:
        if node.op == "call_function" and node.meta.get("val") is not None and isinstance(node.target, OpOverload | type(len)):
            set_dtypes(node, dtypes_of(run(node, mode)), mode)


def set_dtypes(node: Node, dtypes: list[torch.dtype], mode: FakeTensorMode | None) -> None:
    """Note the dtypes of a node's results, in a graph that has examples of them."""
    example = node.meta["val"]
    if mode is not None and dtypes_of(example) != dtypes:
        node.meta["val"] = with_dtypes(example, dtypes, mode)
        # What torch noted beside it holds the old dtype.
        node.meta.pop("tensor_meta", None)


def insert_cast(module: GraphModule, value: Node, dtype: torch.dtype, before: Node, like: Node) -> Node:
    """Put a cast of a value before a node, noted to come from where another one does."""
    with module.graph.inserting_before(before):
        cast = module.graph.create_node("call_function", torch.ops.aten.to.dtype, (value, dtype), name=f"{value.name}_{dtype_name(dtype)}")
    cast.meta = {key: like.meta[key] for key in ORIGIN if key in like.meta}
    cast.meta["val"] = value.meta["val"]
    set_dtypes(cast, [dtype], fake_mode(module))
    return cast


def _with_dtype(example: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    if example.dtype is dtype:
        return example
    with mode, _unnoticed(mode):
        return torch.empty_strided(example.shape, example.stride(), dtype=dtype, device=example.device)


@contextmanager
def _unnoticed(mode: FakeTensorMode) -> Iterator[None]:
    """Only dtypes are wanted: what an op asks of dynamic sizes is no condition on the program, and sizes that depend on numbers are no new symbols."""
    if mode.shape_env is None:
        yield
        return
    with mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        yield
