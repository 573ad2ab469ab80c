"""Which inputs a program was made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from mezzo._casting import cast
from mezzo._dtypes import CASTABLE_DTYPES, dtype_name
from mezzo._torch import pytree, tree_flatten_spec

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Taken:
    """One tensor that a program takes."""

    sizes: tuple[int | None, ...]
    """Its sizes; None where it may change."""
    dtype: torch.dtype

    def fits(self, value: Any) -> bool:
        """Whether a value can be this input."""
        return (
            isinstance(value, torch.Tensor)
            and len(value.shape) == len(self.sizes)
            and all(wanted is None or size == wanted for size, wanted in zip(value.shape, self.sizes, strict=True))
        )

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join('any' if size is None else str(size) for size in self.sizes)}]"


@dataclass(frozen=True)
class Fit:
    """The inputs that a program takes."""

    tensors: tuple[Taken | None, ...]
    """One for each leaf of the inputs; None for what is no tensor."""
    keywords: tuple[str, ...] = ()
    """The keyword arguments, in the order of the example."""
    structure: pytree.TreeSpec | None = None
    """How the inputs are nested, where mappings are among them: their entries may come in another order than in the example."""

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The inputs in the dtypes that the program takes, or None where their sizes are others."""
        if len(self.keywords) > 1:
            kwargs = {name: kwargs[name] for name in (*self.keywords, *kwargs) if name in kwargs}
        given = pytree.tree_leaves((args, kwargs))
        if len(given) != len(self.tensors):
            return None
        if self.structure is not None:
            given = _in_order((args, kwargs), self.structure) or given
        if not all(wanted is None or wanted.fits(value) for wanted, value in zip(self.tensors, given, strict=True)):
            return None
        if all(wanted is None or wanted.dtype is value.dtype for wanted, value in zip(self.tensors, given, strict=True)):
            return args, kwargs
        changed = [_in_dtype(value, wanted) for wanted, value in zip(self.tensors, given, strict=True)]
        found: Call = pytree.tree_unflatten(changed, self.structure or pytree.tree_structure((args, kwargs)))
        return found

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What was passed."""
        return (
            ", ".join(str(Taken(tuple(one.shape), one.dtype)) if isinstance(one, torch.Tensor) else repr(one) for one in pytree.tree_leaves((args, kwargs)))
            or "nothing"
        )

    def __str__(self) -> str:
        return ", ".join(str(one) if one is not None else "…" for one in self.tensors)


def fit(exported: ExportedProgram) -> Fit:
    """Read what a program takes."""
    nodes = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    specs = [spec.arg for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    taken = tuple(_taken(nodes[arg.name]) if isinstance(arg, TensorArgument) else None for arg in specs)
    args, kwargs = pytree.tree_unflatten(range(len(taken)), exported.call_spec.in_spec)
    mapped = any(_has_mapping(one) for one in (*args, *kwargs.values()))
    return Fit(taken, tuple(kwargs), exported.call_spec.in_spec if mapped else None)


def _has_mapping(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(_has_mapping(one) for one in value))


def _in_order(inputs: Any, structure: pytree.TreeSpec) -> list[Any] | None:
    """The leaves in the order of the example; None where the inputs are nested otherwise."""
    try:
        leaves: list[Any] = tree_flatten_spec(inputs, structure)
    except (KeyError, IndexError, TypeError, RuntimeError):
        return None
    return leaves


def _taken(value: Any) -> Taken | None:
    if not isinstance(value, torch.Tensor):
        return None
    return Taken(tuple(int(size) if isinstance(size, int) else None for size in value.shape), value.dtype)


def _in_dtype(value: Any, wanted: Taken | None) -> Any:
    return cast(value, wanted.dtype) if wanted is not None and value.dtype in CASTABLE_DTYPES and wanted.dtype in CASTABLE_DTYPES else value
