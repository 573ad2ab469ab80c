"""What a program may take in a file, and how much of that is left: a file of half the size, with a little for norms, small tables and what 16 bits lose of large ones."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from mezzo.graph.choice import Choice
from mezzo.graph.nodes import Role, values
from mezzo.graph.weights import NAME

BESIDE = "mezzo_beside"
"""In the meta of a placeholder: it was added for what a rounded table has lost."""
_SIZE = "mezzo_size"
"""In the meta of a graph: the bytes of the model's tensors, some of which it may not read any more."""

_TENSORS = 0.54
"""How much of the size of the model's tensors may be stored before tables are rounded."""
_FILE = 0.549
"""How much of the size of the model's file may be used for what rounded tables have lost."""
_NODE = 60
"""Bytes that a node takes in a file, beside the tensors: 40 to 67 in graphs of more than a hundred."""
_TENSOR = 280
"""Bytes that `torch.save` writes beside the numbers of each tensor: 250 to 340."""


def note_size(module: GraphModule, exported: ExportedProgram) -> None:
    """Note on a graph how large the model is that it came from."""
    tensors = [one for one in (*exported.state_dict.values(), *exported.constants.values()) if isinstance(one, torch.Tensor)]
    module.meta[_SIZE] = sum(one.nbytes for one in {id(one): one for one in tensors}.values())


def excess(choice: Choice) -> float:
    """The bytes by which tensors are too large as planned; not above zero where they are small enough."""
    # What is stored beside a rounded table was found room for: no other is rounded for it.
    return sum(stored_bytes(choice, node) for node in _tensors(choice) if BESIDE not in node.meta) - _TENSORS * model_bytes(choice)


def room(choice: Choice) -> float:
    """The bytes for which there is room beside the tensors as planned and the graph; beside the tensors alone where the graph takes it all anyhow."""
    tensors = _FILE * model_bytes(choice) - sum(stored_bytes(choice, node) for node in _tensors(choice))
    text = max(_NODE * len(choice.roles) - _FILE * _TENSOR * len(_tensors(choice)), 0.0)
    return tensors - text if text < tensors else tensors


def stored_bytes(choice: Choice, node: Node) -> int:
    """The bytes that a stored tensor takes as planned."""
    if choice.roles[node] is Role.WEIGHT:
        return values(node)[0].numel() * sum(dtype.itemsize for dtype in choice.stored(node))
    return _bytes(node)


def model_bytes(choice: Choice) -> int:
    """The bytes that the model's tensors have."""
    module = next(iter(choice.roles)).graph.owning_module
    if module is not None and _SIZE in module.meta:
        return int(module.meta[_SIZE])
    return sum(_bytes(node) for node in _tensors(choice))


def _tensors(choice: Choice) -> list[Node]:
    return [node for node in choice.roles if NAME in node.meta]


def _bytes(node: Node) -> int:
    made = node.meta.get("val")
    return made.nbytes if isinstance(made, torch.Tensor) else 0
