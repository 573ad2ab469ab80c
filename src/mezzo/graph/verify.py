"""A converted graph checked op by op: dtypes that the kernel takes, and results of the dtype that the graph says.

Tensors without data are too generous: torch's own checks pass a `linear` of bfloat16 numbers by float32 weights, which no kernel computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo._torch import FakeTensorMode, HigherOrderOperator, OpOverload, pytree, wrap_with_autocast
from mezzo.graph.nodes import base, op_name, reads, values
from mezzo.graph.traits import CASTS, FILLS, LOOKS, MIXED_PARAMETERS, PROMOTING
from mezzo.graph.typing_run import dtypes_of, fake_mode, run

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
            # A closed region of another dtype casts by itself, where tensors without data do not show it.
            if node.target is not wrap_with_autocast:
                _verify_bodies(module, node)
        elif isinstance(node.target, OpOverload):
            _verify_inputs(node)
            if mode is not None:
                _verify_results(node, mode)


def mixed(node: Node) -> list[torch.dtype]:
    """The float dtypes that an op reads and its kernel does not take together; empty where all is well."""
    op = op_name(node) or base(node)
    if op in LOOKS or op in CASTS or op in FILLS or (op in _CONVERTS and node.target._schema.name.endswith("_")):  # type: ignore[union-attr]
        return []
    whole = [read for read in reads(node) if read.argument not in MIXED_PARAMETERS.get(op, ())]
    dtypes = list(dict.fromkeys(one.dtype for read in whole for one in values(read.node)))
    return [] if len(dtypes) < 2 or op in PROMOTING else dtypes  # noqa: PLR2004


def _verify_inputs(node: Node) -> None:
    if (dtypes := mixed(node)) and node.meta.get(KNOWN_MIXED) != dtypes:
        told = ", ".join(f"{read.node.name} {dtype_name(values(read.node)[0].dtype)}" for read in reads(node))
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) reads {' and '.join(map(dtype_name, dtypes))}, which its kernel does not take together: "
            f"{told}. Keep it in float32 with exclude={{{node.name!r}}}, and report this."
        )


def _verify_results(node: Node, mode: FakeTensorMode) -> None:
    said = dtypes_of(node.meta.get("val"))
    if not any(one.is_floating_point for one in said):
        return
    try:
        found = dtypes_of(run(node, mode))
    except Exception as error:
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) does not run: {error}. Keep it in float32 with exclude={{{node.name!r}}}."
        ) from error
    if found != said:
        raise UnsupportedError(
            f"The converted graph is wrong: {node.name} ({node.target}) gives {_names(found)} where the plan says {_names(said)}. "
            f"Keep it in float32 with exclude={{{node.name!r}}}, and report this."
        )


def _verify_bodies(module: GraphModule, node: Node) -> None:
    for one in pytree.tree_leaves(node.args):
        if isinstance(one, Node) and one.op == "get_attr" and isinstance(body := getattr(module, str(one.target), None), GraphModule):
            verify(body)


def _names(dtypes: list[torch.dtype]) -> Any:
    return ", ".join(map(dtype_name, dtypes)) or "nothing"
