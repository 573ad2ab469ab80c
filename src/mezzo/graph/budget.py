"""What a program's weights may take in a file, and how much of that is left."""

from __future__ import annotations

import torch
from torch.fx import Node

from mezzo.graph.choice import Choice
from mezzo.graph.nodes import Role, values

REPLACED = "mezzo_replaced"
"""In the meta of a stored tensor's placeholder that stands for a weight, or for a part of one: the bytes that the weight has in float32."""

_SHARE = 0.545
"""How much of the float32 weights' size may be stored; half is what 16 bits need, the rest is for norms, small tables and what 16 bits lose of large ones."""


def left(choice: Choice) -> float:
    """The bytes that a program may store beyond what it stores as planned; below zero where that is too much. Weights that nobody reads do not count."""
    total = 0.0
    for node, role in choice.roles.items():
        if role is Role.WEIGHT and node.users:
            total += _SHARE * torch.float32.itemsize * values(node)[0].numel() - stored_bytes(choice, node)
        elif REPLACED in node.meta:
            total += _SHARE * node.meta[REPLACED] - node.meta["val"].nbytes
    return total


def stored_bytes(choice: Choice, weight: Node) -> int:
    """The bytes that a weight takes as planned."""
    return values(weight)[0].numel() * sum(dtype.itemsize for dtype in choice.stored(weight))
