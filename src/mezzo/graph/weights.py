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
from mezzo.graph.nodes import Role
from mezzo.graph.typing_run import fake_mode, set_dtypes

NAME = "mezzo_name"
"""In a placeholder's meta: the name of the tensor that the model has for it."""

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass
class Pool:
    """Copies of a model's tensors, one for each dtype: programs of several sizes share them, and so do tied weights."""

    copies: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
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
            beyond = exceeds(_tensor(exported, spec.target), half)
            found[node] = f"{spec.target!r} holds numbers beyond the range of {dtype_name(half)}" if beyond else ""
    return found


def rounding_errors(exported: ExportedProgram, choice: Choice, pool: Pool) -> dict[Node, float]:
    """Return the largest relative error of a row, for each table and other weight that is stored in 16 bits whatever its readers want."""
    found = {}
    for node in choice.rounded:
        tensor = _tensor(exported, node.meta[NAME])
        found[node] = row_error(tensor, pool.take(tensor, choice.half))
    return found


def row_error(tensor: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return the largest relative error of a row, in the Euclidean norm. Rows of zeros and rows with infinities do not count.

    Not of a single number: in float16 a few numbers near zero always underflow, and that would be the error of every table.

    >>> row_error(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.5], [0.0, 0.0]]))
    0.1
    """
    if tensor.is_meta or not tensor.numel():
        return 0.0
    with torch.no_grad():
        difference = rounded.to(tensor.dtype, copy=True).sub_(tensor)
        error, size = (torch.linalg.vector_norm(one, dim=-1, dtype=torch.float64) for one in (difference, tensor))
        return float((error / size).nan_to_num(nan=0.0).max())


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
