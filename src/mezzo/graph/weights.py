"""Weights as they are stored: in the dtype that they are read in, twice where readers disagree, and apart from the model that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from mezzo._casting import cast
from mezzo._dtypes import dtype_name
from mezzo.graph.choice import Choice
from mezzo.graph.nodes import Role, op_name
from mezzo.graph.remainders import factors, fits, fixed_point
from mezzo.graph.traits import PROMOTING, STRUCTURAL, VIEWS
from mezzo.graph.typing_run import fake_mode, set_dtypes

NAME = "mezzo_name"
"""In a placeholder's meta: the name of the tensor that the model has for it."""

FITS = "mezzo_fits"
"""In the meta of a placeholder that is only added or multiplied: whether fixed point can tell its numbers."""

_PARTS = VIEWS | STRUCTURAL
"""Ops that give a tensor or parts of it."""
_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass
class Pool:
    """Copies of a model's tensors, one for each dtype: programs of several sizes share them, and so do tied weights."""

    copies: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    split: dict[tuple[int, torch.dtype, int, bool], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Tables in parts, as `mezzo.graph.remainders` makes them."""
    levels: dict[int, int] = field(default_factory=dict)
    """How finely each table is told beyond its 16 bits."""
    originals: list[torch.Tensor] = field(default_factory=list)
    """Kept, so that no other tensor gets the identity of one that is gone."""

    def take(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of a tensor in a dtype; a parameter stays one, and wants no gradient."""
        key = id(tensor), dtype
        if key not in self.copies:
            self.originals.append(tensor)
            with torch.no_grad():
                copied = cast(tensor.detach(), dtype) if tensor.dtype is not dtype else tensor.detach().clone()
            self.copies[key] = nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied
        return self.copies[key]

    def parts(self, table: torch.Tensor, dtype: torch.dtype, levels: int, *, fixed: bool) -> tuple[torch.Tensor, ...]:
        """A table in 16 bits and further levels: in fixed point with scales of a dtype, or rounded to the dtype."""
        key = id(table), dtype, levels, fixed
        if key not in self.split:
            self.originals.append(table)
            if fixed:
                self.split[key] = fixed_point(table.detach(), dtype, levels)
            else:
                rounded = self.take(table, dtype)
                self.split[key] = rounded, factors(table.detach(), rounded, levels)
        return self.split[key]


@dataclass(frozen=True)
class Stored:
    """The tensors of a program, and how its graph takes them."""

    signature: ExportGraphSignature
    state: dict[str, Any]
    """Parameters and persistent buffers by name."""
    constants: dict[str, Any]
    """Other tensors and objects by name."""
    variants: Mapping[tuple[Node, torch.dtype], Node]
    """The second placeholder of each weight that is stored twice."""


def weight_nodes(exported: ExportedProgram, module: GraphModule, half: torch.dtype) -> dict[Node, str]:
    """The placeholders of stored tensors, each with what forbids 16 bits, or nothing; the tensors' names are noted on them."""
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    found = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in _STORED and spec.target is not None:
            node = placeholders[spec.arg.name]
            node.meta[NAME] = spec.target
            tensor = _tensor(exported, spec.target)
            # What the model does not save, such as positions that it computes, has no place for parts.
            if tensor.dtype is torch.float32 and spec.target in exported.state_dict and _is_added(node):
                node.meta[FITS] = fits(tensor.detach())
            beyond = exceeds(tensor, half)
            found[node] = f"{spec.target!r} holds numbers beyond the range of {dtype_name(half)}" if beyond else ""
    return found


def _is_added(node: Node) -> bool:
    """Whether all who read a value, or a part of it, add or multiply it."""
    return bool(node.users) and all(op_name(user) in PROMOTING or (op_name(user) in _PARTS and _is_added(user)) for user in node.users)


def store(exported: ExportedProgram, module: GraphModule, choice: Choice, pool: Pool) -> Stored:
    """Choose the copies that a program stores, and give its graph a second placeholder where a weight is stored twice."""
    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    state: dict[str, Any] = {}
    constants: dict[str, Any] = {name: value for name, value in exported.constants.items() if not isinstance(value, torch.Tensor)}
    specs: list[InputSpec] = []
    variants: dict[tuple[Node, torch.dtype], Node] = {}
    for spec in exported.graph_signature.input_specs:
        specs.append(spec)
        if spec.kind not in _STORED or spec.target is None:
            continue
        node, tensor = placeholders[spec.arg.name], _tensor(exported, spec.target)
        place = state if spec.target in exported.state_dict else constants
        dtypes = choice.stored(node) if choice.roles[node] is Role.WEIGHT else (tensor.dtype,)
        place[spec.target] = pool.take(tensor, dtypes[0])
        for dtype in dtypes[1:]:
            name, target = f"{node.name}_{dtype_name(dtype)}", f"{spec.target}_{dtype_name(dtype)}"
            variants[node, dtype] = _second(module, node, name, dtype)
            place[target] = pool.take(tensor, dtype)
            specs.append(InputSpec(spec.kind, TensorArgument(name=variants[node, dtype].name), target, spec.persistent))
    return Stored(ExportGraphSignature(specs, exported.graph_signature.output_specs), state, constants, variants)


def _tensor(exported: ExportedProgram, name: str) -> torch.Tensor:
    found: torch.Tensor = exported.state_dict[name] if name in exported.state_dict else exported.constants[name]
    return found


def exceeds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a float32 tensor holds finite numbers beyond the range of a dtype.

    >>> exceeds(torch.tensor([1e5, torch.inf]), torch.float16), exceeds(torch.tensor([1.0, torch.inf]), torch.float16)
    (True, False)
    """
    if tensor.dtype is not torch.float32 or not tensor.numel() or tensor.is_meta:
        return False
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach())
        largest = float(torch.maximum(high, -low))
        if not isfinite(largest):
            largest = float(tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max())
    return largest > torch.finfo(dtype).max


def _second(module: GraphModule, node: Node, name: str, dtype: torch.dtype) -> Node:
    with module.graph.inserting_after(node):
        made = module.graph.placeholder(name)
    made.target, made.meta = made.name, dict(node.meta)
    set_dtypes(made, [dtype], fake_mode(module))
    return made
