"""Half the size, kept: tables that autocast would read in float32 are stored in 16 bits where they would make the file too large."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from mezzo.graph.budget import excess, model_bytes, stored_bytes
from mezzo.graph.choice import Choice
from mezzo.graph.nodes import Role, op_name, values
from mezzo.graph.pins import CARRIES, FOLLOWS, FREE, Pin
from mezzo.graph.traits import EXACT, PROMOTING
from mezzo.graph.weights import FITS

_LEAST = 0.002
"""Of the model's size: rounding what spares less is felt sooner than it helps."""


def squeeze(choice: Choice, pins: Mapping[Node, Pin]) -> tuple[frozenset[Node], dict[Node, Pin]]:
    """The weights to store in 16 bits only, the largest first, and the pins with that; nothing where the weights are small enough already.

    A table of embeddings is the common one: rounding its rows loses less than the layers after it, and float32 rows would make the file twice as large.
    """
    weights = [node for node, role in choice.roles.items() if role is Role.WEIGHT and node.users]
    too_much, needed = excess(choice), {node: stored_bytes(choice, node) for node in weights}
    squeezed, least = list[Node](), _LEAST * model_bytes(choice)
    for node in sorted(weights, key=needed.__getitem__, reverse=True):
        if too_much <= 0:
            break
        spared = needed[node] - values(node)[0].numel() * choice.half.itemsize
        if torch.float32 in choice.stored(node) and spared >= least and _can(node, pins):
            squeezed.append(node)
            too_much -= spared
    changed = {user: Pin(True, "reads a weight that is stored in 16 bits to keep the file small") for node in squeezed for user in node.users if _moves(user)}
    return frozenset(squeezed), dict(pins) | changed


def _can(node: Node, pins: Mapping[Node, Pin]) -> bool:
    """Whether everybody who reads a weight takes it rounded: by moving its rows, by running in 16 bits anyhow, or beside such a reader by promoting."""
    rounding = [pins[user].half is True or pins[user] == CARRIES or (_moves(user) and _is_open(pins[user])) for user in node.users]
    promoting = [op_name(user) in PROMOTING for user in node.users]
    # To round what is only added or multiplied would be felt where nothing else is rounded: fixed point has to hold it.
    held = node.meta.get(FITS, False) and _is_left_open(node, pins)
    return (any(rounding) or held) and all(one or other for one, other in zip(rounding, promoting, strict=True))


def _is_left_open(node: Node, pins: Mapping[Node, Pin]) -> bool:
    """Whether nobody said anything of those who add or multiply a weight, or parts of it: who excludes them wants it exact."""
    return all(_is_open(pins[user]) and (op_name(user) in PROMOTING or _is_left_open(user, pins)) for user in node.users)


def _moves(user: Node) -> bool:
    return op_name(user) in EXACT and op_name(user) not in PROMOTING


def _is_open(pin: Pin) -> bool:
    return pin in (FREE, FOLLOWS)
