"""Inputs and outputs of a converted program: shapes, dtypes, names and devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

from mezzo._casting import cast
from mezzo._dtypes import CASTABLE_DTYPES, dtype_name
from mezzo._errors import UnsupportedError, choices
from mezzo._torch import pytree, tree_flatten_spec

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class TensorInput:
    """One tensor that a program takes."""

    sizes: tuple[int | None, ...]
    """Its sizes; None where it may change."""
    dtype: torch.dtype

    def fits(self, value: Any) -> bool:
        """Whether a value can be this input."""
        return (
            isinstance(value, torch.Tensor)
            and len(value.shape) == len(self.sizes)
            and all(
                wanted is None or size == wanted
                for size, wanted in zip(value.shape, self.sizes, strict=True)
            )
        )

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join('any' if size is None else str(size) for size in self.sizes)}]"


@dataclass(frozen=True)
class InputSignature:
    """The inputs that a program takes."""

    tensors: tuple[TensorInput | None, ...]
    """One for each leaf of the inputs; None for what is no tensor."""
    keywords: tuple[str, ...] = ()
    """The keyword arguments, in the order of the example."""
    structure: pytree.TreeSpec | None = None
    """How the inputs are nested, where mappings are among them: their entries may come in
    another order than in the example."""

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The inputs in the dtypes that the program takes, or None where their sizes are others."""
        if len(self.keywords) > 1:
            kwargs = {name: kwargs[name] for name in (*self.keywords, *kwargs) if name in kwargs}
        given = pytree.tree_leaves((args, kwargs))
        if len(given) != len(self.tensors):
            return None
        if self.structure is not None:
            given = _in_order((args, kwargs), self.structure) or given
        if not all(
            wanted is None or wanted.fits(value)
            for wanted, value in zip(self.tensors, given, strict=True)
        ):
            return None
        if all(
            wanted is None or wanted.dtype is value.dtype
            for wanted, value in zip(self.tensors, given, strict=True)
        ):
            return args, kwargs
        changed = [
            _in_dtype(value, wanted) for wanted, value in zip(self.tensors, given, strict=True)
        ]
        found: Call = pytree.tree_unflatten(
            changed, self.structure or pytree.tree_structure((args, kwargs))
        )
        return found

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What was passed."""
        return (
            ", ".join(
                (
                    str(TensorInput(tuple(one.shape), one.dtype))
                    if isinstance(one, torch.Tensor)
                    else repr(one)
                )
                for one in pytree.tree_leaves((args, kwargs))
            )
            or "nothing"
        )

    def __str__(self) -> str:
        return ", ".join(str(one) if one is not None else "…" for one in self.tensors)


def input_signature(exported: ExportedProgram) -> InputSignature:
    """Read what a program takes."""
    nodes = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    specs = [
        spec.arg
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    taken = tuple(
        _tensor_input(nodes[arg.name]) if isinstance(arg, TensorArgument) else None for arg in specs
    )
    args, kwargs = pytree.tree_unflatten(range(len(taken)), exported.call_spec.in_spec)
    mapped = any(_has_mapping(one) for one in (*args, *kwargs.values()))
    return InputSignature(taken, tuple(kwargs), exported.call_spec.in_spec if mapped else None)


def _has_mapping(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(_has_mapping(one) for one in value)
    )


def _in_order(inputs: Any, structure: pytree.TreeSpec) -> list[Any] | None:
    """The leaves in the order of the example; None where the inputs are nested otherwise."""
    try:
        leaves: list[Any] = tree_flatten_spec(inputs, structure)
    except (KeyError, IndexError, TypeError, RuntimeError):
        return None
    return leaves


def _tensor_input(value: Any) -> TensorInput | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorInput(
        tuple(int(size) if isinstance(size, int) else None for size in value.shape), value.dtype
    )


def _in_dtype(value: Any, wanted: TensorInput | None) -> Any:
    return (
        cast(value, wanted.dtype)
        if wanted is not None and value.dtype in CASTABLE_DTYPES and wanted.dtype in CASTABLE_DTYPES
        else value
    )


def zeros_like_inputs(exported: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Zeros of the sizes that a program was exported with, in the structure of its inputs; None where a size is not known.

    torch checks a program's guards only if it has example inputs. The user's own are not saved:
    they may be private, and only their sizes matter. Zeros that are one element in memory serve as
    well.
    """
    nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    leaves = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        value = (
            spec.arg.value
            if isinstance(spec.arg, ConstantArgument)
            else _zeros(nodes[spec.arg.name].meta["val"])
        )
        if value is NotImplemented:
            return None
        leaves.append(value)
    arguments, keywords = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return tuple(arguments), dict(keywords)


def _zeros(like: Any) -> Any:
    if isinstance(like, torch.Tensor):
        sizes = [_hint(size) for size in like.shape]
        return (
            NotImplemented
            if NotImplemented in sizes
            else torch.zeros((), dtype=like.dtype, device=like.device).expand(sizes)
        )
    return _hint(like)


def _hint(size: Any) -> Any:
    """The value that a dynamic size had, if it is known."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    return NotImplemented if size.node.hint is None else size.node.hint


def named_leaves(nested: Any) -> list[tuple[str, Any]]:
    """Everything in nested outputs, by where it stands; what stands alone is `output`.

    >>> named_leaves({"logits": 1, "hidden": [2, 3]}), named_leaves((1, 2)), named_leaves(1)
    ([('logits', 1), ('hidden_0', 2), ('hidden_1', 3)], [('output_0', 1), ('output_1', 2)], [('output', 1)])
    """
    return [
        (_name(re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")), leaf)
        for path, leaf in pytree.tree_leaves_with_path(nested)
    ]


def _name(words: str) -> str:
    return words if words and not words[0].isdigit() else f"output_{words}".rstrip("_")


def available_devices() -> frozenset[str]:
    """The types of the devices of this machine.

    >>> sorted(available_devices() & {"cpu", "meta"})
    ['cpu', 'meta']
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    return frozenset({"cpu", "meta"} if here is None else {"cpu", "meta", here.type})


def available_device(device: str | torch.device) -> torch.device:
    """A device of this machine, or an error that says which there are."""
    kind = str(device).partition(":")[0]
    if kind not in available_devices():
        raise UnsupportedError(
            f"There is no device {str(device)!r} here. {choices(sorted(available_devices()))}"
        )
    return torch.device(device)
