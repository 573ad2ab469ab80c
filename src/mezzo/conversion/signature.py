"""Inputs and outputs of a converted program: shapes, dtypes, names and devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
"""Arguments and keyword arguments."""

# Inputs


@dataclass(frozen=True)
class TensorInput:
    """Size and dtype of one tensor that a program takes."""

    sizes: tuple[int | None, ...]
    """Its sizes; None for a dynamic one."""
    dtype: torch.dtype

    def fits(self, value: Any) -> bool:
        """Return whether a value is a tensor of these sizes, in any dtype."""
        return (
            isinstance(value, torch.Tensor)
            and len(value.shape) == len(self.sizes)
            and all(
                expected is None or size == expected
                for size, expected in zip(value.shape, self.sizes, strict=True)
            )
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.sizes)
        return f"{dtype_name(self.dtype)}[{sizes}]"


@dataclass(frozen=True)
class InputSignature:
    """The inputs that a program takes."""

    tensors: tuple[TensorInput | None, ...]
    """One for each leaf of the inputs; None for a leaf that is not a tensor."""
    keywords: tuple[str, ...] = ()
    """The keyword arguments, in the order of the example."""
    structure: pytree.TreeSpec | None = None
    """The nesting of the inputs, if they contain mappings: the entries of a mapping may come in
    another order than in the example."""

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Cast inputs to the program's dtypes; return None if their shapes do not match."""
        if len(self.keywords) > 1:
            kwargs = {name: kwargs[name] for name in (*self.keywords, *kwargs) if name in kwargs}
        leaves = pytree.tree_leaves((args, kwargs))
        if len(leaves) != len(self.tensors):
            return None
        if self.structure is not None:
            leaves = _in_example_order((args, kwargs), self.structure) or leaves
        pairs = list(zip(self.tensors, leaves, strict=True))
        if not all(expected is None or expected.fits(value) for expected, value in pairs):
            return None
        if all(expected is None or expected.dtype is value.dtype for expected, value in pairs):
            return args, kwargs
        call: Call = pytree.tree_unflatten(
            [_cast_input(value, expected) for expected, value in pairs],
            self.structure or pytree.tree_structure((args, kwargs)),
        )
        return call

    @staticmethod
    def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the sizes and dtypes of inputs as text, for error messages."""
        leaves = [
            str(TensorInput(tuple(leaf.shape), leaf.dtype))
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for leaf in pytree.tree_leaves((args, kwargs))
        ]
        return ", ".join(leaves) or "nothing"

    def __str__(self) -> str:
        return ", ".join(str(tensor) if tensor is not None else "…" for tensor in self.tensors)


def input_signature(exported: ExportedProgram) -> InputSignature:
    """Return the inputs that a program takes."""
    nodes = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    specs = [
        spec.arg
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    tensors = tuple(
        _tensor_input(nodes[arg.name]) if isinstance(arg, TensorArgument) else None for arg in specs
    )
    args, kwargs = pytree.tree_unflatten(range(len(tensors)), exported.call_spec.in_spec)
    has_mapping = any(_has_mapping(value) for value in (*args, *kwargs.values()))
    structure = exported.call_spec.in_spec if has_mapping else None
    return InputSignature(tensors, tuple(kwargs), structure)


def _tensor_input(value: Any) -> TensorInput | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorInput(
        tuple(int(size) if isinstance(size, int) else None for size in value.shape), value.dtype
    )


def _has_mapping(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(_has_mapping(item) for item in value)
    )


def _in_example_order(inputs: Any, structure: pytree.TreeSpec) -> list[Any] | None:
    """Return the leaves in the order of the example; None if the inputs are nested differently."""
    try:
        leaves: list[Any] = tree_flatten_spec(inputs, structure)
    except (KeyError, IndexError, TypeError, RuntimeError):
        return None
    return leaves


def _cast_input(value: Any, expected: TensorInput | None) -> Any:
    if expected is None or not CASTABLE_DTYPES.issuperset({value.dtype, expected.dtype}):
        return value
    return cast(value, expected.dtype)


def zero_inputs(exported: ExportedProgram) -> Call | None:
    """Return zeros in the sizes and nesting of a program's example inputs.

    torch checks a program's guards only if it has example inputs. The original ones are not saved:
    they may be private, and only their sizes matter. Each tensor of zeros takes one element of
    memory. Returns None if a size is not known.
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
    args, kwargs = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return tuple(args), dict(kwargs)


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
    """Return the value of a dynamic size in the example; NotImplemented if it is not known."""
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    return NotImplemented if size.node.hint is None else size.node.hint


# Outputs


def named_leaves(nested: Any) -> list[tuple[str, Any]]:
    """Return the leaves of nested outputs, each with a name made of its path.

    >>> named_leaves({"logits": 1, "hidden": [2, 3]})
    [('logits', 1), ('hidden_0', 2), ('hidden_1', 3)]
    >>> named_leaves((1, 2)), named_leaves(1)
    ([('output_0', 1), ('output_1', 2)], [('output', 1)])
    """
    if isinstance(nested, Mapping):
        # The outputs of diffusers are mappings of a class that is registered without names.
        nested = dict(nested)
    return [
        (_output_name(re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")), leaf)
        for path, leaf in pytree.tree_leaves_with_path(nested)
    ]


def _output_name(path: str) -> str:
    return path if path and not path[0].isdigit() else f"output_{path}".rstrip("_")


# Devices


def available_devices() -> frozenset[str]:
    """Return the device types of this machine.

    >>> sorted(available_devices() & {"cpu", "meta"})
    ['cpu', 'meta']
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return frozenset({"cpu", "meta"} if accelerator is None else {"cpu", "meta", accelerator.type})


def available_device(device: str | torch.device) -> torch.device:
    """Return a device; raise `UnsupportedError` if this machine does not have it."""
    device_type = str(device).partition(":")[0]
    if device_type not in available_devices():
        raise UnsupportedError(
            f"There is no device {str(device)!r} here. {choices(sorted(available_devices()))}"
        )
    return torch.device(device)
