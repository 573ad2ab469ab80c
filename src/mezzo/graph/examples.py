"""Inputs that stand in for the examples a program was exported with."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from mezzo._torch import pytree


def zeros_like_inputs(exported: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Zeros of the sizes that a program was exported with, in the structure of its inputs; None where a size is not known.

    torch checks a program's guards only if it has example inputs. The user's own are not saved: they may be private, and only their sizes matter. Zeros that
    are one element in memory serve as well.
    """
    nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    leaves = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else _zeros(nodes[spec.arg.name].meta["val"])
        if value is NotImplemented:
            return None
        leaves.append(value)
    arguments, keywords = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return tuple(arguments), dict(keywords)


def _zeros(like: Any) -> Any:
    if isinstance(like, torch.Tensor):
        sizes = [_hint(size) for size in like.shape]
        return NotImplemented if NotImplemented in sizes else torch.zeros((), dtype=like.dtype, device=like.device).expand(sizes)
    return _hint(like)


def _hint(size: Any) -> Any:
    """The value that a dynamic size had, if it is known."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    return NotImplemented if size.node.hint is None else size.node.hint
