"""What a program may take in a file, and how much of that is left: a file of half the size, with a little for norms, small tables and what 16 bits lose of large ones."""

from __future__ import annotations

import torch
from torch.fx import Node

from mezzo.graph.choice import Choice
from mezzo.graph.nodes import Role, values
from mezzo.graph.weights import NAME

REPLACED = "mezzo_replaced"
"""In the meta of a placeholder that stands for a weight: the bytes that the weight has in float32. What is stored beside it for the same weight has none."""

_TENSORS = 0.54
"""How much of the size of the model's tensors may be stored before tables are rounded."""
_FILE = 0.549
"""How much of the size of the model's file may be used for what rounded tables have lost."""
_NODE = 60
"""Bytes that a node takes in a file, beside the tensors: 40 to 67 in graphs of more than a hundred."""
_TENSOR = 280
"""Bytes that `torch.save` writes beside the numbers of each tensor: 250 to 340."""


def excess(choice: Choice) -> float:
    """The bytes by which tensors are too large as planned; not above zero where they are small enough."""
    # What is stored beside a rounded table was found room for: no other is rounded for it.
    return sum(stored_bytes(choice, node) for node in _tensors(choice) if node.meta.get(REPLACED) != 0) - _TENSORS * _full(choice)


def room(choice: Choice) -> float:
    """The bytes for which there is room beside the tensors as planned and the graph: in a file, and without it."""
    text = _NODE * len(choice.roles) - _FILE * _TENSOR * len(_tensors(choice))
    return _FILE * _full(choice) - sum(stored_bytes(choice, node) for node in _tensors(choice)) - max(text, 0.0)


def stored_bytes(choice: Choice, node: Node) -> int:
    """The bytes that a stored tensor takes as planned."""
    if choice.roles[node] is Role.WEIGHT:
        return values(node)[0].numel() * sum(dtype.itemsize for dtype in choice.stored(node))
    return _bytes(node)


def _full(choice: Choice) -> int:
    """The bytes that the model's tensors have."""
    weights = {node: values(node)[0].numel() * torch.float32.itemsize for node in _tensors(choice) if choice.roles[node] is Role.WEIGHT}
    return sum(weights[node] if node in weights else node.meta.get(REPLACED, _bytes(node)) for node in _tensors(choice))


def _tensors(choice: Choice) -> list[Node]:
    return [node for node in choice.roles if NAME in node.meta]


def _bytes(node: Node) -> int:
    made = node.meta.get("val")
    return made.nbytes if isinstance(made, torch.Tensor) else 0
